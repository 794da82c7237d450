"""What vendors' functions want otherwise than operators have it: declared by an adapter, done around its call.

Each file has one kind of difference. A `Transform` is applied by `transformed`, as a decorator of a provider's function
or of anything that is called by keyword; the plain functions below them serve adapters that need one step alone.
"""

from k3hal.dispatch.transforms.heads import PaddedHeads, multiple_of, power_of_two
from k3hal.dispatch.transforms.lse import LseBase, to_base2, to_natural
from k3hal.dispatch.transforms.rows import PaddedRows, live_rows, sequence_of_rows, zeros_elsewhere
from k3hal.dispatch.transforms.slots import KeptNullSlot, NullSlot
from k3hal.dispatch.transforms.states import KFirst, gathered_states, write_back
from k3hal.dispatch.transforms.transform import Transform, transformed

__all__ = [
    "KFirst",
    "KeptNullSlot",
    "LseBase",
    "NullSlot",
    "PaddedHeads",
    "PaddedRows",
    "Transform",
    "gathered_states",
    "live_rows",
    "multiple_of",
    "power_of_two",
    "sequence_of_rows",
    "to_base2",
    "to_natural",
    "transformed",
    "write_back",
    "zeros_elsewhere",
]
