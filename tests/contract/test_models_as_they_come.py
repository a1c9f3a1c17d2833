"""Models as they come: adapted, offloaded, quantized, compiled, in other dtypes, at the end of their positions."""

import copy
import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import selfdraft
from selfdraft import Plan
from selfdraft.drafters.draft_model import DraftModel
from selfdraft.target import PROMPT_PART, Target
from tests.contract.arms import GREEDY, POLICIES, made
from tests.contract.checks import same_tokens
from tests.models import VOCAB, prompts, tiny
from tests.scripted import Script, copy_of, noisy, texts_of

NEW = 16
TREE = Plan(depth=4, width=3, nodes=14)
RAGGED = prompts((3, 9, 14))
DRAFTERS = ["ngram", "draft_model", "medusa", "eagle"]


def own(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """A tiny model that a test may change, with other settings than `tiny` has."""
    if not settings:
        return copy.deepcopy(tiny(family))
    config = AutoConfig.for_model(**{**tiny(family).config.to_dict(), **settings})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


def drafter_for(name: str, model: Any) -> Any:
    return name if name == "ngram" else made(name, Target(model)).eval()


def text(model: Any, drafter: Any = None, inputs: dict = RAGGED, new: int = NEW, **settings: Any) -> torch.Tensor:
    return selfdraft.generate(
        model, **inputs, drafter=drafter, plan=TREE, **{"max_new_tokens": new, **GREEDY, **settings}
    )


def drafts_its_own_text(model: Any, drafter: Any, inputs: dict = RAGGED, new: int = NEW) -> list[list[int]]:
    """The drafted text is that of the model's own `generate`; returns it."""
    reference = model.generate(**inputs, max_new_tokens=new, **GREEDY)
    same_tokens(text(model, drafter, inputs, new), reference)
    return reference.tolist()


# --- Adapters ---------------------------------------------------------------------------------------------------------


def adapted(**settings: Any) -> Any:
    """A tiny llama with a LoRA adapter "one" of random weights, large enough to change what it says."""
    model = get_peft_model(own(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings), adapter_name="one")
    return with_random_weights(model)


def with_random_weights(model: Any) -> Any:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    return model.eval()


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.filterwarnings("ignore:this drafter was made for", "ignore:All adapters are already merged")
def test_the_text_is_that_of_the_adapter_which_is_active(name):
    model = own()
    drafter = drafter_for(name, model)  # made for the base
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="one")
    model.add_adapter("two", LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    with_random_weights(model)
    texts = []
    for adapter in ("one", "two", "one"):
        model.set_adapter(adapter)
        texts.append(drafts_its_own_text(model, drafter, new=8))
    with model.disable_adapter():
        texts.append(drafts_its_own_text(model, drafter, new=8))
    assert texts[0] == texts[2]
    assert texts[0] != texts[1] != texts[3] != texts[0]
    model.merge_adapter()
    drafts_its_own_text(model, drafter, new=8)
    drafts_its_own_text(model.merge_and_unload(), drafter, new=8)


def test_transformers_generate_takes_the_loop_through_an_adapter_too():
    model = adapted(task_type="CAUSAL_LM")
    reference = model.generate(**RAGGED, max_new_tokens=NEW, **GREEDY)
    ours = model.generate(
        **RAGGED, custom_generate=selfdraft.decode, drafter="ngram", plan=TREE, max_new_tokens=NEW, **GREEDY
    )
    same_tokens(ours, reference)


def test_every_row_may_have_an_adapter_of_its_own():
    """What peft's own generate does around that of the model is done around ours."""
    model = adapted(task_type="CAUSAL_LM")
    model.add_adapter("two", LoraConfig(r=4, target_modules=["q_proj"]))
    with_random_weights(model)
    names = ["one", "two", "__base__"]
    reference = model.generate(**RAGGED, adapter_names=names, max_new_tokens=NEW, **GREEDY)
    same_tokens(text(model, "ngram", adapter_names=names), reference)
    assert reference.tolist() != model.generate(**RAGGED, max_new_tokens=NEW, **GREEDY).tolist()


def test_a_saved_drafter_of_the_base_is_loaded_for_an_adapted_model(tmp_path):
    model = own()
    selfdraft.save_drafter(made("eagle", Target(model)), tmp_path / "drafter")
    model = with_random_weights(get_peft_model(model, LoraConfig(r=4, target_modules=["v_proj"])))
    with pytest.warns(UserWarning, match="made for the target with no adapter") as warned:
        ours = text(model, tmp_path / "drafter")
    assert len(warned) == 1
    same_tokens(ours, model.generate(**RAGGED, max_new_tokens=NEW, **GREEDY))


def test_a_drafter_made_for_an_adapter_is_used_with_it_in_silence_and_without_it_with_a_warning(tmp_path):
    model = adapted()
    selfdraft.save_drafter(made("medusa", Target(model)), tmp_path / "drafter")
    drafter = selfdraft.load_drafter(tmp_path / "drafter", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text(model, drafter)
        text(model, "ngram")
    with model.disable_adapter(), pytest.warns(UserWarning, match="no adapter is active now"):
        text(model, drafter)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
@pytest.mark.parametrize("through", ["selfdraft", "transformers"])
def test_an_adapter_that_puts_tokens_in_front_is_refused_by_name(kind, through):
    model = get_peft_model(own(), kind(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="(PROMPT|PREFIX)_TUNING"):
        if through == "selfdraft":
            text(model, "ngram")
        else:
            model.generate(**RAGGED, custom_generate=selfdraft.decode, max_new_tokens=4)


def test_an_adapter_that_waits_for_a_word_of_the_text_is_refused_by_name():
    with pytest.raises(ValueError, match="alora_invocation_tokens"):
        text(adapted(task_type="CAUSAL_LM", alora_invocation_tokens=[5]))


# --- Offloaded --------------------------------------------------------------------------------------------------------

PARTS = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(4)), "model.norm", "model.rotary_emb"]


def on_disk_in_part(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    places = dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk", "lm_head": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def loaded_to_disk(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    model.save_pretrained(f"{folder}/model")
    return AutoModelForCausalLM.from_pretrained(
        f"{folder}/model", device_map={"": "disk"}, offload_folder=f"{folder}/offloaded"
    ).eval()


OFFLOADS = {
    "memory": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "a part on disk": on_disk_in_part,
    "loaded to disk": loaded_to_disk,
}


@pytest.mark.parametrize(
    ("offload", "name"),
    [("memory", "medusa"), ("disk", "eagle"), ("loaded to disk", "medusa")]
    + [("a part on disk", name) for name in DRAFTERS],
)
def test_an_offloaded_model_is_drafted_for_where_it_computes(offload, name, tmp_path):
    """The weights have no values between the passes; drafters borrow embeddings and the vocabulary projection."""
    model = OFFLOADS[offload](own(), str(tmp_path))
    assert model.get_output_embeddings().weight.is_meta
    target = Target(model)
    assert target.device == torch.device("cpu")
    assert target.identity() == Target(tiny("llama")).identity() | {"name": target.identity()["name"]}
    reference = tiny("llama").generate(**RAGGED, max_new_tokens=8, **GREEDY)
    same_tokens(text(model, drafter_for(name, model), new=8), reference)


def test_a_draft_model_may_be_offloaded_itself(tmp_path):
    model = tiny("llama")
    draft = disk_offload(own("qwen2"), str(tmp_path), execution_device="cpu")
    drafts_its_own_text(model, DraftModel.from_model(draft, Target(model)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("places", [("cuda", "cpu"), ("cpu", "cuda")])
def test_the_vocabulary_projection_may_lie_on_another_device_than_the_layers(places, name):
    parts = dict.fromkeys(PARTS, places[0]) | {"lm_head": places[1]}
    model = dispatch_model(own(), parts, force_hooks=True)
    inputs = {key: each.to(places[0]) for key, each in RAGGED.items()}
    drafts_its_own_text(model, drafter_for(name, model), inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("places", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_drafter_follows_the_target_to_its_device(places, name):
    model = own().to(places[0])
    drafter = drafter_for(name, model)
    drafter = drafter if name == "ngram" else drafter.to(places[1])
    drafts_its_own_text(model, drafter, {key: each.to(places[0]) for key, each in RAGGED.items()})


# --- Quantized --------------------------------------------------------------------------------------------------------


class Int8Weights(nn.Module):
    """A projection kept in int8, one scale per row; it computes in float32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.numbers = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.out_features = linear.out_features

    def weight(self) -> torch.Tensor:
        return self.numbers * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight())


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_model_with_int8_weights_is_as_exact_as_any_other(name):
    model = own()
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, key, Int8Weights(child))
    drafts_its_own_text(model, drafter_for(name, model))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_where_activations_are_quantized_by_the_pass_the_text_is_what_the_model_says_in_those_passes(name):
    """Their scale depends on all tokens of a pass, so that not even a row of a batch equals its single run there.

    What stays: without a drafter one row gives the model's own text, and with one every token is the model's best
    in the pass that decided it.
    """
    model = torch.ao.quantization.quantize_dynamic(own(), {nn.Linear}, dtype=torch.qint8)
    one = prompts((9,))
    same_tokens(text(model, None, one), model.generate(**one, max_new_tokens=NEW, **GREEDY))
    out = text(model, drafter_for(name, model), return_dict_in_generate=True, output_logits=True)
    assert out.sequences.shape == (3, 14 + NEW)
    best = torch.stack([logits.argmax(-1) for logits in out.logits], dim=1)
    same_tokens(out.sequences[:, 14:], best)


# --- Compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs():
    """How many graphs torch.compile has made since the test began; its state is put back afterwards."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_forward_is_compiled_a_few_times_for_all_prompts_and_plans(dynamic, graphs):
    """Ten prompts, three depths, chains and trees, a different acceptance in every round."""
    model = own(num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    inputs = [prompts((length,), seed=length) for length in range(4, 14)]
    references = [model.generate(**each, max_new_tokens=24, **GREEDY) for each in inputs]
    model.forward = torch.compile(model.forward, dynamic=dynamic, backend="eager")
    for plan in (Plan(3), Plan(5, 3, 14), Plan(7)):
        for each, reference in zip(inputs, references, strict=True):
            script = Script(texts_of(each, reference), [3, 0, 1, 4, 2], VOCAB)
            ours = selfdraft.generate(model, **each, drafter=script, plan=plan, max_new_tokens=24, **GREEDY)
            same_tokens(ours, reference)
    assert 1 <= graphs() <= 4


@pytest.mark.parametrize("way", ["model.compile", "torch.compile"])
def test_a_model_compiled_as_a_whole_drafts_its_own_text(way, graphs):
    model = own(num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    reference = model.generate(**RAGGED, max_new_tokens=NEW, **GREEDY)
    if way == "torch.compile":
        compiled: Any = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
        compiled = model
    same_tokens(text(compiled, "ngram"), reference)


# --- Configs and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("settings", [{"use_cache": False}, {"tie_word_embeddings": True}], ids=str)
def test_settings_of_the_checkpoint_change_nothing(settings, name):
    model = own(**settings)
    drafts_its_own_text(model, drafter_for(name, model))


@pytest.mark.parametrize("name", DRAFTERS[1:])
@pytest.mark.parametrize("policy", ["greedy", "T1"])
def test_a_bf16_drafter_on_a_float32_target_is_exact(name, policy):
    model = tiny("llama")
    drafter = drafter_for(name, model).to(torch.bfloat16)
    settings = {**POLICIES[policy], "seed": 5}
    same_tokens(text(model, drafter, **settings), text(model, **settings))


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy_with_a_bf16_drafter_too(temperature):
    model = tiny("llama")
    drafter = noisy(model, 0.05).to(torch.bfloat16)
    ours = text(model, drafter, do_sample=True, temperature=temperature, top_k=0, seed=5)
    same_tokens(ours, model.generate(**RAGGED, max_new_tokens=NEW, **GREEDY))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_float32_drafter_on_a_bf16_target_works(name):
    """In bf16 a pass of another width rounds otherwise; the texts are of one length, and begin alike."""
    model = own().to(torch.bfloat16)
    ours = text(model, drafter_for(name, model).float() if name != "ngram" else name)
    reference = model.generate(**RAGGED, max_new_tokens=NEW, **GREEDY)
    assert ours.shape == reference.shape
    same_tokens(ours[:, :15], reference[:, :15])


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def with_tokenizer(model: PreTrainedModel, folder: Any, words: list[str]) -> PreTrainedModel:
    """The model loaded from a folder that holds a tokenizer of these words too."""
    model.save_pretrained(folder)
    words_only = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=words_only).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    loaded.generation_config.pad_token_id = 0
    return loaded


def test_a_draft_model_whose_tokenizer_swaps_two_tokens_is_refused_with_the_first_of_them(tmp_path):
    words = [f"w{index}" for index in range(VOCAB)]
    model = with_tokenizer(own(), tmp_path / "target", words)
    with_tokenizer(own("qwen2"), tmp_path / "draft", [*words[:40], "w70", *words[41:70], "w40", *words[71:]])
    with pytest.raises(ValueError, match="token 40 is 'w70' and the target's is 'w40'"):
        selfdraft.load_drafter(tmp_path / "draft", model)


def test_a_draft_model_with_one_token_more_drafts(tmp_path):
    words = [f"w{index}" for index in range(VOCAB)]
    model = with_tokenizer(own(), tmp_path / "target", words[:-1])
    with_tokenizer(own("qwen2"), tmp_path / "draft", words)
    drafts_its_own_text(model, selfdraft.load_drafter(tmp_path / "draft", model))


# --- Long texts -------------------------------------------------------------------------------------------------------


def test_a_long_prompt_in_parts_is_that_prompt_in_one_pass(monkeypatch):
    model = own(max_position_embeddings=2048)
    inputs = prompts((1100,))
    reference = model.generate(**inputs, max_new_tokens=NEW, **GREEDY)
    for drafter in ("ngram", copy_of(model)):
        same_tokens(text(model, drafter, inputs), reference)
        monkeypatch.setattr("selfdraft.target.PROMPT_PART", 2048)
        same_tokens(text(model, drafter, inputs), reference)
        monkeypatch.setattr("selfdraft.target.PROMPT_PART", PROMPT_PART)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_vocabulary_projection_sees_the_nodes_of_a_tree_and_no_prompt(name):
    model = own()
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[1]))
    text(model, drafter_for(name, model), prompts((400,)))
    assert rows[0] == 1
    assert max(rows) <= TREE.nodes + 1


@pytest.mark.parametrize("family", ["gpt2", "opt", "biogpt"])
@pytest.mark.parametrize("name", [*DRAFTERS, "copy", "script"])
def test_learned_positions_are_used_to_the_last_one(family, name):
    """Nothing stands at a position that the table lacks, and the last tokens are still the model's own.

    By the script the longer row runs ahead, and has no room for the drafts that the shorter one still wants.
    """
    limit = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model = own(family, **{limit: 64})
    inputs = prompts((58, 51))
    if name == "script":
        reference = model.generate(**inputs, max_new_tokens=64 - 58, **GREEDY)
        drafter: Any = Script(texts_of(inputs, reference), [3, 1], VOCAB)
    else:
        drafter = copy_of(model) if name == "copy" else drafter_for(name, model)
    drafts_its_own_text(model, drafter, inputs, new=64 - 58)


@pytest.mark.parametrize("prompt", [60, 64, 65, 200])
def test_past_its_own_limit_a_draft_model_stops_with_one_warning(prompt):
    model = tiny("llama")
    draft = DraftModel.from_model(own(max_position_embeddings=64), Target(model))
    with pytest.warns(UserWarning, match="64 positions") as warned:
        drafts_its_own_text(model, draft, prompts((prompt,)))
    assert len(warned) == 1


@pytest.mark.parametrize(("family", "attention"), [("mistral", "sdpa"), ("phi3", "eager"), ("gpt_oss", "eager")])
def test_a_batch_slides_out_of_the_window_at_different_times(family, attention):
    """Prompts that end before, at and past the window of 16, and three windows more."""
    model, inputs = tiny(family, attention), prompts((1, 15, 16, 17, 40))
    reference = model.generate(**inputs, max_new_tokens=48, **GREEDY)
    script = Script(texts_of(inputs, reference), [3, 0, 8, 1, 4, 7, 2], VOCAB)
    for depth in (3, 8):
        ours = selfdraft.generate(model, **inputs, drafter=script, plan=Plan(depth), max_new_tokens=48, **GREEDY)
        same_tokens(ours, reference)


# --- Many calls -------------------------------------------------------------------------------------------------------


def living() -> int:
    """Tensors alive. Asked of the type, since some objects warn when they are asked for their class."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_three_hundred_calls_leave_nothing_behind():
    model = own(num_hidden_layers=1)
    drafter = drafter_for("eagle", model)
    counts = []
    for call in range(300):
        text(model, drafter if call % 2 else None, prompts((5,)), new=4)
        if call in (20, 299):
            counts.append(living())
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_four_threads_share_a_model_and_a_drafter(name):
    model = tiny("llama")
    drafter = drafter_for(name, model)
    inputs = [prompts((4 + 7 * index,), seed=index) for index in range(4)]
    alone = [text(model, drafter, each).tolist() for each in inputs]
    together: list[Any] = [None] * 4
    start = threading.Barrier(4)

    def work(index: int) -> None:
        start.wait()
        together[index] = [text(model, drafter, inputs[index]).tolist() for _ in range(3)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [[each] * 3 for each in alone]
