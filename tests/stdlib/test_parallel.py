"""Layout presets, on modules that need no workers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monarch.compiler.errors import LayoutError
from monarch.compiler.types import Layout, MeshSpec, TensorType
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import LINEAR_LAYERS, combine, data_parallel, fully_shard, tensor_parallel

MESH = MeshSpec.of(data=2, model=4)


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


def test_a_column_layers_bias_is_cut_and_a_row_layers_is_whole() -> None:
    module = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
    layouts = texts(tensor_parallel(module, MESH, "model"))
    assert (layouts["up.bias"], layouts["down.bias"]) == ("[@model]", "[-]")


def test_the_table_can_be_extended_by_name_and_by_pattern() -> None:
    module = nn.ModuleDict({"expand": nn.Linear(8, 16), "net": nn.Sequential(nn.Linear(16, 8)), "up": nn.Linear(8, 8)})
    table = {**LINEAR_LAYERS, "expand": "column", "net.*": "row"}
    layouts = texts(tensor_parallel(module, MESH, "model", table=table))
    assert layouts["expand.weight"] == "[@model, -]"
    assert layouts["net.0.weight"] == "[-, @model]"
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
        "  A mesh dim can cut a tensor once. Give each of the layouts a mesh dim of its own."
    )


@pytest.mark.parametrize("preset", [fully_shard, tensor_parallel])
def test_an_unknown_mesh_dim_is_named(preset: object) -> None:
    with pytest.raises(LayoutError) as error:
        preset(gpt(), MESH, "tp")  # type: ignore[operator]
    assert str(error.value) == "unknown mesh dim 'tp'\n  The mesh is mesh<data=2, model=4>: its dims are data, model."


def test_sizes_that_the_mesh_dim_does_not_divide() -> None:
    module = nn.ModuleDict({"up": nn.Linear(9, 6), "down": nn.Linear(3, 2)})
    assert str(tensor_parallel(module, MESH, "model")["up.weight"]) == "[@model, -]"
    layouts = {name: str(layout) for name, layout in fully_shard(module, MESH, "model").items()}
    assert layouts == {"up.weight": "[-, @model]", "up.bias": "[@model]", "down.weight": "[-, -]", "down.bias": "[-]"}
    both = combine(tensor_parallel(module, MESH, "model"), fully_shard(module, MESH, "data"))
    assert str(both["up.weight"]) == "[@(model,data), -]"


def test_a_module_with_no_layer_in_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no linear layer of Sequential is in the table"):
        tensor_parallel(nn.Sequential(nn.Linear(4, 4)), MESH, "model")


def test_a_wrong_word_in_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="the table gives 'columns' for 'up': it must be 'column' or 'row'"):
        tensor_parallel(nn.ModuleDict({"up": nn.Linear(8, 8)}), MESH, "model", table={"up": "columns"})
