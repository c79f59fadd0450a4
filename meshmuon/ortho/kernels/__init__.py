"""Matrix products of the iteration, one implementation per kind of device behind one interface."""

from .inverse import ShiftedInverses, inverse_scratch, inverse_work, most_inverses
from .products import (
    KERNELS,
    BlockedProducts,
    FunctionalProducts,
    Prepared,
    Products,
    QuackProducts,
    TritonProducts,
    check_kernels,
    products_for,
)

__all__ = [
    "KERNELS",
    "BlockedProducts",
    "FunctionalProducts",
    "Prepared",
    "Products",
    "QuackProducts",
    "ShiftedInverses",
    "TritonProducts",
    "check_kernels",
    "inverse_scratch",
    "inverse_work",
    "most_inverses",
    "products_for",
]
