"""selfdraft: let a Hugging Face causal LM draft for itself, losslessly."""

from selfdraft.checkpoint import load_drafter, save_drafter
from selfdraft.generate import GenerateOutput, decode, generate
from selfdraft.planner import Plan

__all__ = ["GenerateOutput", "Plan", "decode", "generate", "load_drafter", "save_drafter"]
__version__ = "0.1.0"
