"""What is inside known architectures: which parameters are matrices, and which matrices a parameter holds.

It is data rather than code: tables of names, classes and attributes of modules. No model library is imported, so it
works where none is installed.
"""

from .by_names import model_from_names
from .contents import CONV_ADAMW, LOOKS_FUSED, LORA_FACTOR, UNKNOWN_STACK, ModelContents, ParamContents
from .fused import looks_fused_name
from .names import is_table_name, name_parts
from .not_matrices import SMALL_FILTER
