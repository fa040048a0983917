"""Layout presets, on modules that need no workers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import LayoutError
from monarch.compiler.types import Layout, MeshSpec, TensorType
from monarch.language import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import automatic, combine, data_parallel, fully_shard, tensor_parallel

MESH = MeshSpec.of(data=2, model=4)


TABLE = {"up": "column", "down": "row"}


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(width=64, layers=1, heads=4)


def texts(layouts: dict[str, Layout]) -> dict[str, str]:
    return {name: str(layout) for name, layout in layouts.items()}


def test_data_parallel_leaves_everything_whole() -> None:
    layouts = data_parallel(gpt())
    assert layouts.keys() == dict(gpt().named_parameters()).keys()
    assert all(layout.is_replicated for layout in layouts.values())


def test_fully_shard_takes_the_first_dim_that_divides_or_else_the_longest() -> None:
    module = nn.ParameterDict(
        {
            "matrix": torch.empty(6, 8),
            "second": torch.empty(3, 8),
            "neither": torch.empty(3, 5),
            "short": torch.empty(1, 1),
            "scalar": torch.empty(()),
            "none": torch.empty(0, 4),
        }
    )
    assert texts(fully_shard(module, MESH, "data")) == {
        "matrix": "[@data, -]",
        "second": "[-, @data]",
        "neither": "[-, @data]",
        "short": "[-, -]",
        "scalar": "[]",
        "none": "[-, @data]",
    }


def test_tensor_parallel_cuts_columns_then_rows() -> None:
    assert texts(tensor_parallel(gpt(), MESH, "model")) == {
        "positions": "[-, -]",
        "embedding.weight": "[-, -]",
        "blocks.0.attention_norm.weight": "[-]",
        "blocks.0.attention.q.weight": "[@model, -]",
        "blocks.0.attention.k.weight": "[@model, -]",
        "blocks.0.attention.v.weight": "[@model, -]",
        "blocks.0.attention.o.weight": "[-, @model]",
        "blocks.0.mlp_norm.weight": "[-]",
        "blocks.0.mlp.up.weight": "[@model, -]",
        "blocks.0.mlp.down.weight": "[-, @model]",
        "norm.weight": "[-]",
        "head.weight": "[-, -]",
    }


class MLP(nn.Sequential):
    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width), nn.LayerNorm(width))


class Fused(nn.Module):
    """Attention with one projection for queries, keys and values, split apart after it (`heads_last`), or before heads
    are told apart, and a gated MLP with one projection for both halves."""

    def __init__(self, heads: int, heads_last: bool) -> None:
        super().__init__()
        self.heads, self.heads_last = heads, heads_last
        self.norm = nn.LayerNorm(24)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.gate_up, self.down = nn.Linear(24, 64), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.qkv(self.norm(x))
        if self.heads_last:
            q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in h.chunk(3, -1))
        else:
            q, k, v = h.unflatten(2, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def test_tensor_parallel_says_what_it_chose() -> None:
    assert tensor_parallel(gpt(), MESH, "model").why == (
        "tensor_parallel over model=4:\n"
        "  blocks.*.attention.q, blocks.*.attention.k, blocks.*.attention.v by columns, blocks.*.attention.o by rows "
        "(4 heads)\n"
        "  blocks.*.mlp.up by columns, blocks.*.mlp.down by rows (256 wide)\n"
        "  the other 6 parameters whole"
    )


def test_layers_are_found_in_the_graph_whatever_their_names() -> None:
    layouts = tensor_parallel(MLP(), MESH, "model")
    assert texts(layouts) == {
        "0.weight": "[@model, -]",
        "0.bias": "[@model]",
        "2.weight": "[-, @model]",
        "2.bias": "[-]",
        "3.weight": "[-]",
        "3.bias": "[-]",
    }


def test_a_fused_projection_that_is_cut_within_each_head_is_a_column_layer() -> None:
    layouts = tensor_parallel(Fused(4, heads_last=False), MESH, "model")
    assert (str(layouts["qkv.weight"]), str(layouts["out.weight"])) == ("[@model, -]", "[-, @model]")
    assert "  qkv by columns, out by rows (4 heads)" in layouts.why


def test_a_fused_projection_that_is_cut_across_heads_is_stored_in_shards() -> None:
    layouts = tensor_parallel(Fused(4, heads_last=True), MESH, "model")
    assert (str(layouts["qkv.weight"]), str(layouts["out.weight"])) == ("[@model, -]", "[-, @model]")
    assert "  qkv stored by columns, and gathered; out by rows (4 heads)" in layouts.why
    assert "  gate_up stored by columns, and gathered; down by rows (32 wide)" in layouts.why


def test_heads_that_workers_cannot_share_stay_whole() -> None:
    layouts = tensor_parallel(Fused(3, heads_last=False), MESH, "model")
    assert layouts["qkv.weight"].is_replicated and layouts["out.weight"].is_replicated
    assert "3 heads, which 4 workers cannot share equally" in layouts.why


def test_inputs_may_be_given() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.inner(x * scale)

    asked = r'Two does not show the .*\n  Give the arg.*\(module, mesh, "model", inputs=\{"x": x, "scale": scale\}\)'
    with pytest.raises(ValueError, match=asked):
        tensor_parallel(Two(), MESH, "model")
    with pytest.raises(ValueError, match=r"tensor_parallel cannot trace Two on f32\[3, 7\]: .*\n  Give the arg"):
        tensor_parallel(Two(), MESH, "model", inputs=(torch.zeros(3, 7),))
    layouts = tensor_parallel(Two(), MESH, "model", inputs=(torch.zeros(3, 8), torch.zeros(())))
    assert str(layouts["inner.0.weight"]) == "[@model, -]"
    by_name = tensor_parallel(Two(), MESH, "model", inputs={"scale": torch.zeros(()), "x": torch.zeros(3, 8)})
    assert by_name == layouts


def test_inputs_are_those_of_the_first_kind_of_layer_that_can_be_traced() -> None:
    class Patches(nn.Module):
        """Positions have an embedding, which takes no input."""

        def __init__(self) -> None:
            super().__init__()
            self.positions, self.norm, self.inner = nn.Embedding(4, 8), nn.LayerNorm(8), MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.norm(x + self.positions(torch.arange(4))))

    assert str(tensor_parallel(Patches(), MESH, "model")["inner.0.weight"]) == "[@model, -]"


def test_adapters_of_low_rank_do_not_keep_their_layers_whole() -> None:
    class Adapted(nn.Linear):
        """As LoRA has it: through a rank of 4."""

        def __init__(self, width: int, out: int) -> None:
            super().__init__(width, out)
            self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, out, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.b(self.a(x))

    layouts = tensor_parallel(nn.Sequential(Adapted(64, 256), nn.GELU(), nn.Linear(256, 64)), MESH, "model")
    assert str(layouts["0.weight"]) == "[@model, -]" and str(layouts["2.weight"]) == "[-, @model]"
    assert str(layouts["0.b.weight"]) == "[@model, -]" and layouts["0.a.weight"].is_replicated


def test_parameters_that_inputs_do_not_reach_are_named() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.scale = MLP(), nn.ModuleList([MLP()]), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
            return self.left(x) if image is None else self.left(x) + self.right[0](image) * self.scale

    why = tensor_parallel(Towers(), MESH, "model").why
    assert "scale, right.* whole: no op of this forward pass takes them" in why
    inputs = {"x": torch.zeros(3, 8), "image": torch.zeros(3, 8)}
    assert "no op of" not in tensor_parallel(Towers(), MESH, "model", inputs=inputs).why


def test_a_module_without_pairs_of_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="Sequential has no column layers that meet row layers in its graph"):
        tensor_parallel(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), MESH, "model")


def test_auto_says_what_it_chose() -> None:
    mesh = Mesh.abstract(data=2, model=2)
    needed = automatic(MLP(), mesh, memory=1 << 30)
    assert str(needed["0.weight"]) == "[@model, -]"
    assert needed.why.splitlines()[-1] == (
        "data parallel over data: state in training takes 0.0 MiB of a worker's 1,024 MiB"
    )
    short = automatic(MLP(), mesh, memory=1000)
    assert (str(short["0.weight"]), str(short["2.weight"])) == ("[@(model,data), -]", "[@data, @model]")
    assert short.why.splitlines()[-1].startswith("fully sharded over data: replicated, state in training takes")
    plain = automatic(nn.Linear(4, 4), Mesh.abstract(tp=2), memory=1 << 30)
    assert plain["weight"].is_replicated
    assert plain.why.startswith("no tensor parallelism over tp: Linear has no column layers that meet row layers")


def test_a_module_is_placed_with_automatic_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Mesh.abstract(data=2, model=2)
    module = monarch.module_to_mesh(MLP(), mesh, layouts="auto")
    assert str(module[0].weight.sharding) == "[@model, -]"
    assert capsys.readouterr().err.startswith("monarch: tensor_parallel over model=2:\n  0 by columns, 2 by rows")
    with pytest.raises(LayoutError, match="layouts='none'"):
        monarch.module_to_mesh(MLP(), mesh, layouts="none")


def test_a_table_names_layers_and_patterns() -> None:
    module = nn.ModuleDict({"expand": nn.Linear(8, 16), "net": nn.Sequential(nn.Linear(16, 8)), "up": nn.Linear(8, 8)})
    layouts = texts(tensor_parallel(module, MESH, "model", table={**TABLE, "expand": "column", "net.*": "row"}))
    assert (layouts["expand.weight"], layouts["expand.bias"]) == ("[@model, -]", "[@model]")
    assert (layouts["net.0.weight"], layouts["net.0.bias"]) == ("[-, @model]", "[-]")
    assert layouts["up.weight"] == "[@model, -]"


def test_a_module_may_be_one_linear_layer() -> None:
    layouts = tensor_parallel(nn.Linear(8, 8), MESH, "model", table={"": "column"})
    assert texts(layouts) == {"weight": "[@model, -]", "bias": "[@model]"}


def test_fully_sharded_tensor_parallel_nests_data_in_model() -> None:
    model = gpt()
    layouts = combine(tensor_parallel(model, MESH, "model"), fully_shard(model, MESH, "data"))
    assert str(layouts["blocks.0.attention.q.weight"]) == "[@(model,data), -]"
    assert str(layouts["blocks.0.attention.o.weight"]) == "[@data, @model]"
    assert str(layouts["embedding.weight"]) == "[@data, -]"
    for name, parameter in model.named_parameters():
        TensorType(parameter.dtype, tuple(parameter.shape), layouts[name]).check(MESH, name)


def test_combine_keeps_names_that_only_one_of_them_has() -> None:
    cut = Layout((("data",),))
    assert combine({"a": cut}, {"b": cut}) == {"a": cut, "b": cut}
    assert combine() == {}


def test_combine_refuses_a_mesh_dim_twice() -> None:
    model = gpt()
    with pytest.raises(LayoutError) as error:
        combine(tensor_parallel(model, MESH, "model"), fully_shard(model, MESH, "model"))
    assert str(error.value) == (
        "two of the layouts of 'blocks.0.attention.q.weight' name mesh dim 'model': [@model, -] and [@model, -]\n"
        "  A mesh dim can shard a tensor once. Give each of the layouts a mesh dim of its own."
    )


@pytest.mark.parametrize("preset", [fully_shard, tensor_parallel])
def test_an_unknown_mesh_dim_is_named(preset: object) -> None:
    with pytest.raises(LayoutError) as error:
        preset(gpt(), MESH, "tp")  # type: ignore[operator]
    assert error.value.message == "unknown mesh dim 'tp'"
    assert error.value.hint == "the mesh is mesh<data=2, model=4>: its dims are data, model."
    assert error.value.source is not None and error.value.source.text == 'preset(gpt(), MESH, "tp")'


def test_sizes_that_the_mesh_dim_does_not_divide() -> None:
    module = nn.ModuleDict({"up": nn.Linear(9, 6), "down": nn.Linear(3, 2)})
    assert str(tensor_parallel(module, MESH, "model", table=TABLE)["up.weight"]) == "[@model, -]"
    layouts = {name: str(layout) for name, layout in fully_shard(module, MESH, "model").items()}
    assert layouts == {"up.weight": "[-, @model]", "up.bias": "[@model]", "down.weight": "[-, -]", "down.bias": "[-]"}
    both = combine(tensor_parallel(module, MESH, "model", table=TABLE), fully_shard(module, MESH, "data"))
    assert str(both["up.weight"]) == "[@(model,data), -]"


def test_a_module_with_no_layer_in_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no linear layer of Sequential is in the table"):
        tensor_parallel(nn.Sequential(nn.Linear(4, 4)), MESH, "model", table=TABLE)


def test_a_wrong_word_in_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="the table gives 'columns' for 'up': it must be 'column' or 'row'"):
        tensor_parallel(nn.ModuleDict({"up": nn.Linear(8, 8)}), MESH, "model", table={"up": "columns"})


def test_tensor_parallel_takes_modules_whose_norms_keep_statistics() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.BatchNorm1d(8))
    layouts = tensor_parallel(module, MESH, "model", inputs=(torch.zeros(4, 8),))
    assert texts(layouts) | {"3.weight": "[-]", "3.bias": "[-]"} == texts(layouts)
    assert (str(layouts["0.weight"]), str(layouts["2.weight"])) == ("[@model, -]", "[-, @model]")
    assert texts(tensor_parallel(module, MESH, "model")) == texts(
        layouts
    )  # rows are tried too: these norms take no others
