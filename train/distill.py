"""Make training data out of the target's own answers: the same as `selfdraft distill`.

python train/distill.py --count 5000 --output_dir data/answers
python train/distill.py --count 50 --seed 1 --output_dir data/held_out
accelerate launch train/heads.py --config configs/medusa_smollm2.yaml --data.train "data/answers/train-*.parquet" \
    --data.validation "data/held_out/train-*.parquet"
"""

import sys

from selfdraft.cli import main

if __name__ == "__main__":
    sys.exit(main(["distill", *sys.argv[1:]]))
