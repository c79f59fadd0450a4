"""Matrix products of the iteration, one implementation per kind of device behind one interface."""

from .inverse import ShiftedInverses, inverse_scratch, inverse_work
from .products import BlockedProducts, FunctionalProducts, Prepared, Products, TritonProducts, products_for

__all__ = [
    "BlockedProducts",
    "FunctionalProducts",
    "Prepared",
    "Products",
    "ShiftedInverses",
    "TritonProducts",
    "inverse_scratch",
    "inverse_work",
    "products_for",
]
