"""EAGLE-1: its loss is the slow formula of what it drafts with, and its noise is training's alone."""

import copy

import pytest
import torch
from torch import nn

import selfdraft
from selfdraft import Plan
from selfdraft.drafters.base import Observed
from selfdraft.drafters.eagle1 import Eagle1, Eagle1Config
from selfdraft.sampling import Noise
from selfdraft.target import Target
from tests.drafters.rounds import ANSWER, PROMPT, batch_of, own_text, stats_of
from tests.models import VOCAB, tiny

SILENT = Noise(torch.zeros(1, dtype=torch.long), 0.0)


def eagle1(**settings) -> Eagle1:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Eagle1(Eagle1Config(**settings), Target(tiny("llama"))).eval()


def observed(tokens: torch.Tensor, features: torch.Tensor, length: int) -> Observed:
    """The first `length` tokens of one text, as a first round sees them."""
    places = torch.arange(length).unsqueeze(0)
    return Observed(tokens[:, :length], places, torch.tensor([length]), features[:, :length], length, 0)


@torch.no_grad()
def foretold(drafter: Eagle1, tokens: torch.Tensor, features: torch.Tensor, length: int) -> torch.Tensor:
    """What drafting makes of the last of `length` hidden states: [hidden]."""
    seen = observed(tokens, features, length)
    return drafter.read(drafter.begin(1).cache, seen, tokens[:, length])[0, -1]


def test_the_loss_is_the_slow_formula_of_what_drafting_foretells():
    drafter, tokens = eagle1(draft_vocab_size=40, token_weight=0.3), own_text()
    drafter.start(torch.arange(VOCAB))  # the draft vocabulary is the 40 highest ids
    batch = batch_of(drafter.target, (-1,), tokens, pad=3)
    rows = drafter.target.head_weight()[-40:].detach()
    reference, drafted = 0.0, 0
    for label in range(PROMPT, PROMPT + ANSWER):
        ours, true = foretold(drafter, tokens, batch.features, label - 1), batch.hidden[0, label - 1]
        difference = (ours - true).abs()
        reference += torch.where(difference < 1, difference.square() / 2, difference - 0.5).mean()
        if tokens[0, label] >= VOCAB - 40:
            drafted += 1
            reference -= 0.3 * ((rows @ true).softmax(-1) * (rows @ ours).log_softmax(-1)).sum()
    loss = drafter(batch)
    assert 0 < drafted < ANSWER and int(loss.count) == ANSWER  # some can be drafted, and all count
    torch.testing.assert_close(loss.total, reference, rtol=1e-4, atol=1e-4)


def test_a_deeper_level_reads_the_drafters_own_output_as_if_it_were_the_targets():
    drafter, tokens = eagle1(), own_text()
    features = batch_of(drafter.target, (-1,), tokens).features
    tree = drafter.propose(drafter.begin(1), observed(tokens, features, 9), tokens[:, 9], Plan(3), SILENT)
    text, states = tokens[:, :10], features[:, :9]
    for token in tree.tokens[0, 1:]:
        own = foretold(drafter, text, states, text.shape[1] - 1)
        assert int((drafter.rows() @ own).argmax()) == int(token)
        text = torch.cat([text, token.view(1, 1)], dim=1)
        states = torch.cat([states, own.view(1, 1, -1)], dim=1)
    assert len(set(tree.tokens[0].tolist())) > 1


def test_noise_is_up_to_its_size_times_512_by_the_texts_length_and_only_in_training(monkeypatch):
    drafter = eagle1(noise=0.2)
    long, short = own_text(answer=40), own_text(answer=12)
    batches = [batch_of(drafter.target, (-1,), text, pad=pad) for text, pad in ((long, 0), (short, 28))]
    read = []
    enter = Eagle1.enter

    def entered(self, tokens, hidden):
        read.append(hidden)
        return enter(self, tokens, hidden)

    monkeypatch.setattr(Eagle1, "enter", entered)
    for batch, length in zip(batches, (45, 17), strict=True):
        drafter.train()(batch)
        noise = (read.pop() - batch.features)[0, :length].abs()
        limit = 0.2 * 512 / length
        assert 0.98 * limit < noise.max() <= limit * (1 + 1e-4)  # 1000 draws: below 0.98 once in 10^8
        assert abs(float(noise.mean()) - limit / 2) < 0.05 * limit
        drafter.eval()(batch)
        assert torch.equal(read.pop(), batch.features)


def test_the_same_seed_gives_the_same_noise():
    drafter = eagle1().train()
    batch = batch_of(drafter.target, (-1,), own_text())
    with torch.random.fork_rng():
        losses = [torch.manual_seed(seed) and drafter(batch).total.detach() for seed in (1, 1, 2)]
    assert losses[0].equal(losses[1]) and not losses[0].equal(losses[2])


def test_a_batch_without_answers_has_no_loss_and_no_gradient():
    drafter = eagle1()
    batch = batch_of(drafter.target, (-1,), own_text(), prompt=PROMPT + ANSWER)
    loss = drafter(batch)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and int(loss.count) == 0
    assert all((weight.grad == 0).all() for weight in drafter.parameters())


def test_every_weight_learns_and_none_is_the_targets():
    drafter = eagle1()
    drafter(batch_of(drafter.target, (-1,), own_text())).total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())
    assert copy.deepcopy(drafter).target is drafter.target


def test_its_tensors_are_those_of_the_methods_checkpoints():
    layer = [f"self_attn.{each}_proj.weight" for each in "qkvo"]
    layer += [f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")] + ["post_attention_layernorm.weight"]
    state = eagle1().state_dict()
    assert set(state) == {"fc.weight", "fc.bias", *(f"layers.0.{name}" for name in layer)}
    assert state["fc.weight"].shape == (64, 128) and state["layers.0.self_attn.q_proj.weight"].shape == (64, 64)


def test_half_precision_serves_a_full_precision_target_and_the_reverse():
    tokens = own_text()
    stats_of(tiny("llama"), eagle1().to(torch.bfloat16), tokens, Plan(3, 2, 5))
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    drafter = Eagle1(Eagle1Config(), Target(model))
    assert selfdraft.generate(model, tokens, drafter=drafter, max_new_tokens=6).shape[1] == tokens.shape[1] + 6
    drafter(batch_of(Target(model), (-1,), tokens)).total.backward()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="hidden_size is 64, not 32"):
        eagle1(hidden_size=32)
    with pytest.raises(ValueError, match="another model object"):
        eagle1().check(Target(copy.deepcopy(tiny("llama"))))
    drafter = eagle1(draft_vocab_size=40)
    drafter.check(drafter.target)
    drafter.ids[7] = 5  # there already
    with pytest.raises(ValueError, match="draft_tokens"):
        drafter.check(drafter.target)
    assert isinstance(drafter.layer, nn.Module)
