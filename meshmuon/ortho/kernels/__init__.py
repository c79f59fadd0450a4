"""Matrix products of the iteration, one implementation per kind of device behind one interface."""

from .products import BlockedProducts, FunctionalProducts, Products, TritonProducts, products_for

__all__ = ["BlockedProducts", "FunctionalProducts", "Products", "TritonProducts", "products_for"]
