"""`train/heads.py` under FSDP2 on CPUs, for the tests: accelerate offers that on accelerators only."""

import sys
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "train")]
import heads  # noqa: E402

plain = AcceleratorState.__init__


def sharded(self, *args, fsdp_plugin=None, **kwargs):
    plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is None:
        return  # somebody asks for the state that is there
    self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    self.fsdp_plugin = fsdp_plugin


if __name__ == "__main__":
    AcceleratorState.__init__ = sharded
    heads.main(sys.argv[1:])
