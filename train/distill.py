"""Make training data out of the target's own answers: the same as `selfdraft distill`.

python train/distill.py --count 5000 --output_dir data/answers
accelerate launch train/heads.py --config configs/medusa_smollm2.yaml --data.train "data/answers/train-*.parquet"
"""

import sys

from selfdraft.cli import main

if __name__ == "__main__":
    sys.exit(main(["distill", *sys.argv[1:]]))
