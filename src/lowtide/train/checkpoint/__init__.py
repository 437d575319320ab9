"""Checkpoints and snapshots: copies of the training state to which a trainer can return."""

from ._manager import Checkpoints as Checkpoints
from ._snapshots import RunMetadata as RunMetadata
from ._snapshots import Snapshots as Snapshots
from ._snapshots import open_checkpoints as open_checkpoints
from ._snapshots import require_checkpoints as require_checkpoints
from ._storage import CheckpointBytes as CheckpointBytes
from ._storage import checkpoint_bytes as checkpoint_bytes

__all__ = [
    "CheckpointBytes",
    "Checkpoints",
    "RunMetadata",
    "Snapshots",
    "checkpoint_bytes",
    "open_checkpoints",
    "require_checkpoints",
]
