"""What is kept between forward and backward: counted in bytes of storage, not promised."""

import pytest
import torch
from torch import nn

from mxfp8.recipe import LinearRecipe
from numerics_tests.composition import ALL_RECIPES
from numerics_tests.test_linear import make, run, same

M, K, N = 512, 256, 128


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes of all storages that autograd keeps for one call of ``layer``, its parameters excepted."""
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    for parameter in layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_recipe_states_what_is_kept(dtype: torch.dtype, recipe: LinearRecipe, device: torch.device) -> None:
    x = torch.randn(M, K, device=device).to(dtype)  # no gradient for it, so that no weight is kept for dgrad
    bits = recipe.saved_bits_per_element(8 * dtype.itemsize)
    assert saved_bytes(make(recipe, K, N, device=device), x) == M * K * bits / 8


def test_the_ratio_to_bf16(device: torch.device) -> None:
    x = torch.randn(M, K, device=device).bfloat16()
    plain = saved_bytes(nn.Linear(K, N, device=device, dtype=torch.bfloat16), x)
    assert saved_bytes(make("mxfp8_rceil", K, N, device=device), x) / plain == 8.25 / 16
    assert saved_bytes(make("mxfp8_coalesced", K, N, device=device), x) / plain == (8 + 8 / 128**2) / 16
    assert saved_bytes(make("mxfp8_rceil_wgrad_with_hp", K, N, device=device), x) == plain


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=str)
def test_keeping_bytes_costs_no_bits(recipe: LinearRecipe, device: torch.device) -> None:
    """The bytes that are kept are those that wgrad multiplies: gradients do not depend on ``save_activations``."""
    from dataclasses import replace

    x, dy = torch.randn(33, 64, device=device), torch.randn(33, 96, device=device)
    results = []
    layer = make(recipe, device=device)
    for kept in ("mxfp8", "high_precision"):
        layer.recipe = replace(recipe, save_activations=kept)
        results.append(run(layer, x, dy))
    assert same(*results)


def test_nothing_is_kept_for_what_needs_no_gradient(device: torch.device) -> None:
    x = torch.randn(M, K, device=device)
    layer = make("mxfp8_rceil", K, N, device=device).requires_grad_(False)
    assert saved_bytes(layer, x) == 0
    weight_bytes = N * K + N * K // 32
    assert saved_bytes(layer, x.requires_grad_()) == weight_bytes  # the weight as dgrad multiplies it
    with torch.no_grad():
        assert saved_bytes(layer, x) == 0
