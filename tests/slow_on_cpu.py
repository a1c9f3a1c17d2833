"""train/heads.py whose first process takes `SECONDS` to read its data; the others wait for at most `PATIENCE`."""

import os
import sys
import time
from datetime import timedelta

sys.path.insert(0, "train")
import heads  # noqa: E402

read = heads.read_conversations


def read_slowly(*args, **settings):
    if os.environ["RANK"] == "0":
        time.sleep(float(os.environ["SECONDS"]))
    return read(*args, **settings)


if __name__ == "__main__":
    heads.read_conversations = read_slowly
    heads.LONG = timedelta(seconds=float(os.environ["PATIENCE"])) if "PATIENCE" in os.environ else heads.LONG
    heads.main(sys.argv[1:])
