"""`train/heads.py` under DeepSpeed on CPUs, for the tests: accelerate offers that on accelerators only."""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DeepSpeedPlugin, DistributedType  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "train")]
import heads  # noqa: E402

plain = AcceleratorState.__init__


def sharded(self, *args, **kwargs):
    begun = bool(AcceleratorState._shared_state)
    plain(self, *args, **kwargs)
    if begun:
        return  # somebody asks for the state that is there
    self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(kwargs["mixed_precision"])
    self.deepspeed_plugins = plugin
    plugin.select(_from_accelerator_state=True)


if __name__ == "__main__":
    AcceleratorState.__init__ = sharded
    heads.main(sys.argv[1:])
