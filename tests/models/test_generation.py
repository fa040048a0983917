"""Generation, against that of `transformers`: partitioned, and run by the reference executor."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.errors import PerformanceWarning, ProgramError
from monarch.compiler.types import Layout
from monarch.language import Mesh, module_to_mesh, program
from monarch.stdlib import generation
from monarch.stdlib.generation import Sampling, generate
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import data_parallel, fully_shard, tensor_parallel
from tests.language.partitioned import COMPILED, partitioned_mesh
from tests.models.families import FAMILIES
from tests.models.test_library import twins

PROMPTS = [[5, 9, 13, 4], [7, 8], [3, 3, 3]]
LAYOUTS: dict[str, Callable[[Any, Mesh], Mapping[str, Layout]]] = {
    "data parallel": lambda model, mesh: data_parallel(model),
    "fully sharded": lambda model, mesh: fully_shard(model, mesh, "data"),
    "tensor parallel": lambda model, mesh: tensor_parallel(model, mesh, "model"),
}


def family(name: str) -> Any:
    """A model whose greedy tokens are not all the same."""
    torch.manual_seed(0)
    model = FAMILIES[name].model().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def theirs(model: Any, count: int, prompts: list[list[int]] = PROMPTS, **options: Any) -> torch.Tensor:
    """What transformers generates."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    found: torch.Tensor = model.generate(input_ids=tokens, attention_mask=seen, max_new_tokens=count, **options)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "qwen2", "phi", "gemma", "opt"])
def test_greedy_tokens_are_those_of_transformers(name: str, layouts: str) -> None:
    model = family(name)
    wanted = theirs(model, 6)
    assert len(set(wanted[:, -6:].flatten().tolist())) > 3
    with partitioned_mesh(data=2, model=2) as mesh:
        module_to_mesh(model, mesh, LAYOUTS[layouts](model, mesh))
        assert torch.equal(generate(model, PROMPTS, max_new_tokens=6, batch_layout="[@data, -]"), wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_of_attention_are_those_of_transformers(name: str) -> None:
    """Prompts of 4 tokens and 6 more, where layers see the last 4: in Mistral all, in Gemma 3 some."""
    model = family(name)
    wanted = theirs(model, 6)
    model.config.sliding_window = 100
    assert not torch.equal(theirs(model, 6), wanted)
    model.config.sliding_window = 4
    with partitioned_mesh(data=2) as mesh:
        module_to_mesh(model, mesh, {})
        assert torch.equal(generate(model, PROMPTS, max_new_tokens=6, batch_layout="[@data, -]"), wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_counts_for_prompts_behind_shorter_ones_that_had_none(name: str) -> None:
    model = family(name)
    model.config.sliding_window = 100
    whole = theirs(model, 3, [[5, 9, 13, 4, 7, 8, 2, 30]])
    with partitioned_mesh(data=2) as mesh:
        module_to_mesh(copied := copy.deepcopy(model), mesh, {})
        model.config.sliding_window = copied.config.sliding_window = 4
        for prompts in [[5]], [[5, 9, 13, 4, 7, 8, 2, 30]], [[9]]:
            wanted = theirs(model, 3, prompts)
            assert torch.equal(generate(copied, prompts, max_new_tokens=3), wanted)
            assert len(prompts[0]) == 1 or not torch.equal(wanted, whole)


SIZES = [(3, 5), (7, 9), (3, 11)]
"""Numbers of prompts, and the length of the longest: none is equal to another, or to one of the model's, by chance."""


def some(number: int, longest: int) -> list[list[int]]:
    return [[(7 * at + 11 * row) % 50 + 1 for at in range(longest - row)] for row in range(number)]


@pytest.fixture
def compiled_once() -> Iterator[None]:
    """A program that is compiled for each shape fails its test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        COMPILED.clear()
        yield
    assert COMPILED == ["generate"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt-neox", "qwen2", "phi", "gemma", "opt"])
def test_one_plan_serves_prompts_of_all_numbers_and_lengths(name: str, compiled_once: None) -> None:
    model = family(name)
    wanted = [theirs(model, 3, some(*sizes)) for sizes in SIZES]
    with partitioned_mesh(model=2) as mesh:
        module_to_mesh(model, mesh, tensor_parallel(model, mesh, "model"))
        for sizes, tokens in zip(SIZES, wanted, strict=True):
            assert torch.equal(generate(model, some(*sizes), max_new_tokens=3), tokens)


def test_tokens_drawn_by_one_plan_are_those_of_a_plan_for_each_shape(
    compiled_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family("gpt2")
    with partitioned_mesh(data=2) as mesh:
        module_to_mesh(model, mesh, {})

        def drawn(prompts: list[list[int]], pad: int) -> list[Any]:
            monarch.manual_seed(len(prompts[0]))
            return generate(model, prompts, max_new_tokens=3, temperature=1.0, top_k=40, pad=pad).tolist()

        found = [drawn(some(count, length), pad=0) for count, length in ((3, 5), (3, 9), (5, 11))]
        monkeypatch.setattr(generation, "Tokens", torch.Tensor)
        monkeypatch.setattr(generation, "Seen", torch.Tensor)
        plain = drawn(some(3, 9), pad=-1)  # other options, and so another program: without names
        assert [[max(0, token) for token in row] for row in plain] == found[1]


def test_sequences_end_behind_a_token_that_stops_them() -> None:
    model = family("llama")
    plain = theirs(model, 8)[:, -8:]
    stop = [int(plain[0, 2]), int(plain[1, 4])]
    wanted = theirs(model, 8, eos_token_id=stop)
    alone = theirs(model, 8, eos_token_id=plain[:, 1].tolist())
    assert alone.shape[1] < plain.shape[1] + 4  # all end early
    with partitioned_mesh(data=2) as mesh:
        module_to_mesh(model, mesh, {})
        assert torch.equal(generate(model, PROMPTS, max_new_tokens=8, stop=stop), wanted)
        assert torch.equal(generate(model, PROMPTS, max_new_tokens=8, stop=plain[:, 1].tolist()), alone)


def test_what_is_generated_follows_training() -> None:
    """The program reads the trainer's own parameters: there is no second copy to bring up to date."""
    model = family("llama")
    with partitioned_mesh(data=2) as mesh:
        changed = copy.deepcopy(model)
        module_to_mesh(model, mesh, {})
        before = generate(model, PROMPTS, max_new_tokens=4)
        head = model.lm_head.weight

        @program
        def train() -> None:
            with torch.no_grad():
                head.neg_()

        train()
        with torch.no_grad():
            changed.lm_head.weight.neg_()
        after = generate(model, PROMPTS, max_new_tokens=4)
        assert not torch.equal(before, after)
        assert torch.equal(after, theirs(changed, 4))


def plainly(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gpt", "llama", "moe"])
def test_the_models_of_the_library_generate(kind: str) -> None:
    torch.manual_seed(1)
    model = GPT(vocabulary=61, width=32, layers=2, heads=4, sequence=16) if kind == "gpt" else twins(kind)[0]
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    wanted = [plainly(model, prompt, 5) for prompt in PROMPTS]
    with partitioned_mesh(data=2, model=2) as mesh:
        module_to_mesh(model, mesh, tensor_parallel(model, mesh, "model"))
        model.train()
        found = generate(model, PROMPTS, max_new_tokens=5)
        assert model.training and all(module.training for module in model.modules())
    assert [row[4 - len(prompt) :] for row, prompt in zip(found.tolist(), PROMPTS, strict=True)] == wanted


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8}], ids=str
)
def test_tokens_are_drawn_from_what_transformers_draws_from(options: dict[str, Any]) -> None:
    from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(7, 61, generator=torch.Generator().manual_seed(0)) * 3
    wanted = TemperatureLogitsWarper(options["temperature"])(None, logits)
    if "top_k" in options:
        wanted = TopKLogitsWarper(options["top_k"])(None, wanted)
    if "top_p" in options:
        wanted = TopPLogitsWarper(options["top_p"])(None, wanted)
    torch.testing.assert_close(Sampling(**options).probabilities(logits), wanted.softmax(-1))


@pytest.mark.full
def test_drawn_tokens_follow_the_seed_and_are_likely_ones() -> None:
    model = GPT(vocabulary=61, width=32, layers=1, heads=4, sequence=16)  # compiled five times
    with partitioned_mesh(data=2, model=2) as mesh:
        module_to_mesh(model, mesh, tensor_parallel(model, mesh, "model"))

        def draw(seed: int, **options: Any) -> list[Any]:
            monarch.manual_seed(seed)
            return generate(model, PROMPTS, max_new_tokens=3, temperature=1.0, **options).tolist()

        assert draw(1) == draw(1) != draw(2)
        assert draw(1, batch_layout="[@data, -]") == draw(1)
        assert draw(3, top_k=1) == generate(model, PROMPTS, max_new_tokens=3).tolist()
        assert draw(3, top_p=1e-6) == generate(model, PROMPTS, max_new_tokens=3).tolist()


@pytest.mark.full
def test_a_tensor_of_prompts_and_no_new_tokens() -> None:
    model = family("gpt2")
    prompts = torch.tensor([[5, 6, 7], [7, 6, 5]])
    with partitioned_mesh(data=2) as mesh:
        wanted = model.generate(prompts, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
        module_to_mesh(model, mesh, {})
        assert torch.equal(generate(model, prompts, max_new_tokens=3), wanted)
        assert torch.equal(generate(model, prompts, max_new_tokens=0), prompts)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "its forward pass takes no positions, mask and cache"),
        ("t5", "its forward pass takes no positions"),
        ("gpt-neo", "its attention needs a cache that grows"),
        ("mamba", "its forward pass takes no positions"),
    ],
)
def test_a_model_that_cannot_be_run_so_is_refused(name: str, why: str) -> None:
    with partitioned_mesh(data=2) as mesh:
        model = module_to_mesh(family(name), mesh, {})
        with pytest.raises(ProgramError, match=why):
            generate(model, PROMPTS, max_new_tokens=2)


def test_where_generate_cannot_the_call_of_transformers_works_as_the_error_says() -> None:
    model = family("bloom")
    tokens = torch.tensor([[5, 9, 13], [7, 8, 3]])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(tokens, **options, pad_token_id=0)
    with partitioned_mesh(data=2) as mesh:
        module_to_mesh(model, mesh, {})
        with pytest.raises(ProgramError, match=r"op by op: model.generate\("):
            generate(model, tokens, max_new_tokens=2)
        found = model.generate(tokens, **options, pad_token_id=0)
        assert torch.equal(getattr(found, "full_tensor", lambda: found)(), wanted)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ProgramError, match="GPT is not on a mesh"):
        generate(GPT(), PROMPTS, max_new_tokens=2)
    with partitioned_mesh(data=2) as mesh:
        model = module_to_mesh(GPT(), mesh, {})
        for prompts, message in [
            ([[1], []], "an empty prompt"),
            ([[1, 2], [0.5]], r"prompt 1 is no list of tokens: \[0.5\]"),
            ([5, 6], "prompt 0 is no list of tokens: 5"),
            (["text"], "prompt 0 is no list of tokens: 'text'"),
            ("text", "prompts is a str"),
            ({"input_ids": [[5]]}, r'(?s)prompts is a dict.*\["input_ids"\]'),
        ]:
            with pytest.raises(ProgramError, match=message):
                generate(model, prompts, max_new_tokens=2)  # type: ignore[arg-type]
    for options, message in [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": 1e-45}, "temperature=1e-45"),
        ({"temperature": 1.0, "top_k": True}, "top_k=True"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"stop": 5}, "stop is no list of tokens: 5"),
        ({"stop": [[5], [6]]}, "stop is no list of tokens"),
        ({"top_k": 3}, "top_k and top_p without a temperature"),
    ]:
        with pytest.raises(ProgramError, match=message):
            generate(GPT(), PROMPTS, **{"max_new_tokens": 2, **options})


@pytest.mark.full
def test_padding_is_any_number() -> None:
    model = family("llama")
    wanted = theirs(model, 4)
    stop = [int(wanted[0, -3])]
    with partitioned_mesh(data=2) as mesh:
        module_to_mesh(model, mesh, {})
        found = generate(model, PROMPTS, max_new_tokens=4, stop=stop, pad=-1)
    wanted[0, -2:] = -1
    for row, prompt in zip(wanted, PROMPTS, strict=True):
        row[: 4 - len(prompt)] = -1
        for at in range(4, 7):
            if int(row[at]) in stop:
                row[at + 1 :] = -1
    assert torch.equal(found, wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_a_table_of_positions_ends(kind: str) -> None:
    model: Any = GPT(vocabulary=61, width=32, layers=1, heads=4, sequence=1024) if kind == "gpt" else family(kind)
    prompt = [1] * 1023
    with partitioned_mesh(data=2) as mesh:
        module_to_mesh(model, mesh, {})
        with pytest.raises(ProgramError, match=r"(?s)has 1024 positions.*max_new_tokens=2 at most.*prompt\[-1022:\]"):
            generate(model, [prompt], max_new_tokens=3)
        with pytest.raises(ProgramError, match=r"(?s)  give the end of each prompt: prompt\[-1022:\]"):
            generate(model, [prompt * 2], max_new_tokens=3)
        assert generate(model, [prompt], max_new_tokens=2).shape == (1, 1025)
        assert generate(model, [prompt[-1022:]], max_new_tokens=3).shape == (1, 1025)
