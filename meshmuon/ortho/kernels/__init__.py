"""Matrix products and inverses of the iteration, one implementation per kind of device behind one interface."""
