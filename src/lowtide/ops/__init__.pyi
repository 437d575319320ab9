"""Attention and maps over tokens with small intermediate arrays, selected for the target of the traced program."""

from ._attention import attention as attention
from ._attention import attention_implementation as attention_implementation
from ._attention import choose_attention as choose_attention
from ._delta_rule import Documents as Documents
from ._delta_rule import delta_span as delta_span
from ._delta_rule import gated_delta_rule as gated_delta_rule
from ._delta_rule import scan_spans as scan_spans
from ._delta_rule import short_convolution as short_convolution
from ._dispatch import AttentionCase as AttentionCase
from ._dispatch import AttentionChoice as AttentionChoice
from ._implementations import IMPLEMENTATIONS as IMPLEMENTATIONS
from ._implementations import Implementation as Implementation
from ._options import AttentionMask as AttentionMask
from ._tiled_map import tiled_map as tiled_map
