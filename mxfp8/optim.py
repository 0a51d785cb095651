"""Optimisers that leave the weights they update already quantised for the next forward pass.

A step reads and writes a weight anyway. The kernels behind these optimisers cast it while they hold it and put the
copies into the weight caches of the MXFP8 layers, so that the next forward neither reads nor casts the weight again::

    model = mxfp8.convert(model, policy)
    optimizer = mxfp8.optim.AdamW(model, lr=3e-4)

What a layer asked for in the last forward is what it gets: both orientations, a single square copy, or one only where
no gradient flows to the layer's input. Layers are found when the optimiser is made; after converting more of them, call
:meth:`~AdamW.attach`. Everything else is as with the optimisers of ``torch.optim``: parameter groups, closures,
schedulers, ``state_dict`` and hooks.

A copy is used only while its weight has not changed since (:class:`mxfp8.weight_cache.WeightCache`). On CUDA a write
through ``weight.data`` between step and forward cannot be seen: call ``layer.clear_cache()`` after it, or write through
``weight.detach()``, which can. An optimiser with step hooks of the user's makes no copies, since a hook may write so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import Optimizer

from mxfp8 import dispatch
from mxfp8.formats import get_format, get_scale_rule
from mxfp8.grouped import MXFP8GroupedLinear
from mxfp8.linear import MXFP8Linear
from mxfp8.reference.optim import WeightCast
from mxfp8.tensor import MXTensor
from mxfp8.weight_cache import Key, WeightCache

__all__ = ["AdamW", "RowwiseAdagrad"]

Copies = list[tuple[torch.Tensor, torch.Tensor]]
Params = nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]]

_SMALL = 1 << 16
"""Parameters of fewer elements, without copies, are updated together: a launch each would take longer than the work."""


class _FillingOptimizer(Optimizer):
    """What the optimisers here share: finding layers, and the way of a parameter through a step."""

    def __init__(self, params: Params, defaults: dict[str, Any], model: nn.Module | None, backend: str) -> None:
        if isinstance(params, nn.Module):
            model = params if model is None else model
            params = params.parameters()
        if backend not in ("auto", *dispatch.BACKENDS):
            raise ValueError(f"unknown backend {backend!r}: use 'auto' or one of {', '.join(dispatch.BACKENDS)}")
        super().__init__(params, defaults)
        self.backend = backend
        self._layers: dict[int, list[MXFP8Linear | MXFP8GroupedLinear]] = {}
        if model is not None:
            self.attach(model)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("backend", "auto")
        self.__dict__.setdefault("_layers", {})
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def attach(self, model: nn.Module) -> None:
        """Keep the weights of ``model``'s MXFP8 layers quantised from now on (instead of a model attached before)."""
        self._layers = {}
        for layer in model.modules():
            if isinstance(layer, (MXFP8Linear, MXFP8GroupedLinear)):
                self._layers.setdefault(id(layer.weight), []).append(layer)

    @property
    def fills_weight_caches(self) -> bool:
        """True if a step tells the weight caches what it wrote; false if hooks of the user's may write after it."""
        return not self._optimizer_step_post_hooks

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{type(self).__name__}.step cannot be captured: the step number is part of the launch")
        for group in self.param_groups:
            for p in self._together([p for p in group["params"] if p.grad is not None], group):
                self._step_one(p, group)
        return loss

    def _together(self, params: list[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        """Update some of ``params`` in one go; returns the others."""
        return params

    def _step_one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        wanted = self._wanted(p)
        keys: list[Key] = list(dict.fromkeys(key for _, used in wanted for key in used))
        for cache, _ in wanted:
            cache.clear()  # before the new copies are made: their memory can be that of the old ones
        casts = [
            WeightCast(
                axis=axis, fmt=get_format(spec.fmt), block=spec.block, scale_rule=get_scale_rule(spec.scale_rule)
            )
            for spec, axis in keys
        ]
        made = self._update(p, group, casts)
        torch.autograd.graph.increment_version(p)
        copies = {
            (spec, axis): MXTensor(*parts, spec.fmt, axis, spec.block)
            for (spec, axis), parts in zip(keys, made, strict=True)
        }
        for cache, used in wanted:
            if used:
                cache.put(p, {key: copies[key] for key in used})

    def _wanted(self, p: torch.Tensor) -> list[tuple[WeightCache, tuple[Key, ...]]]:
        """The caches of the layers that hold ``p``, each with the copies it was asked for."""
        caches = [layer._cache for layer in self._layers.get(id(p), ()) if layer.weight is p]
        fill = self.fills_weight_caches and _is_plain(p) and p.grad is not None and not p.grad.is_sparse
        return [(cache, cache.used(p) if fill else ()) for cache in caches]

    def _update(self, p: torch.Tensor, group: dict[str, Any], casts: list[WeightCast]) -> Copies:
        raise NotImplementedError

    def _run(self, op: str, p: torch.Tensor) -> Callable[..., Copies]:
        """The function for one parameter; "auto" leaves to torch what kernels do not take."""
        takes = _is_plain(p) and p.is_contiguous() and p.dtype != torch.float64
        backend = "reference" if self.backend == "auto" and not takes else self.backend
        run: Callable[..., Copies] = dispatch.resolve(op, backend, p.device)
        return run

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``, which would narrow float32 states to the dtype of their parameter."""
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if name == "step":
                    self.state[p][name] = torch.tensor(float(value), dtype=torch.float32)
                elif isinstance(value, torch.Tensor):
                    self.state[p][name] = value.to(device=p.device, dtype=_state_dtype(p), copy=True)
        for group in self.param_groups:
            if group.get("amsgrad"):
                raise ValueError(f"{type(self).__name__} has no amsgrad, which the loaded state was made with")


class AdamW(_FillingOptimizer):
    """``torch.optim.AdamW`` that also quantises the weights it updates.

    Args:
        params: a model, or parameters or parameter groups as for ``torch.optim``.
        lr: a number, or a tensor of one element (on the device of the parameters it is read there, without a stall).
        betas, eps, weight_decay, maximize: as ``torch.optim.AdamW``.
        model: whose MXFP8 layers get copies; default: ``params`` if that is a model, else none get any.
        master_weights: keep a float32 copy of narrower parameters, update that, and round it to the parameter.
        backend: ``"auto"``, or a name that must run or raise.

    States are float32 whatever the parameter (``step``, ``exp_avg``, ``exp_avg_sq``, ``master``), under the names of
    ``torch.optim.AdamW``, whose ``state_dict`` can be loaded here and the other way round.

    Raises:
        ValueError: hyperparameters out of range.
        RuntimeError: sparse gradients.

    **Numerics.** On CPU the bits of ``torch.optim.AdamW(foreach=False)`` in float32, rounded once to a narrower
    parameter; kernels evaluate the same formula with every operation rounded. Copies are the bits of
    :func:`mxfp8.quantize` applied to the updated parameter.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        model: nn.Module | None = None,
        master_weights: bool = False,
        backend: str = "auto",
    ) -> None:
        _check_rate(lr)
        _check_at_least_zero(eps=eps, weight_decay=weight_decay)
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{i}] is {beta}: use a number in 0..1, 1 excluded")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults, model, backend)

    def _together(self, params: list[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        if self.backend != "auto" or isinstance(group["lr"], torch.Tensor):
            return params
        small = [p for p in params if p.is_cuda and p.dtype == torch.float32 and p.numel() < _SMALL and _is_plain(p)]
        small = [p for p in small if id(p) not in self._layers and p.grad is not None and not p.grad.is_sparse]
        if len(small) < 2:
            return params
        states = [self._state(p, group) for p in small]
        beta1, beta2 = group["betas"]
        torch_adamw(
            small, [p.grad for p in small if p.grad is not None], [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states], foreach=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=group["maximize"],
        )  # fmt: skip
        done = set(map(id, small))
        return [p for p in params if id(p) not in done]

    def _state(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, dtype=_state_dtype(p))
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=_state_dtype(p))
        _add_master(state, p, group)
        return state

    def _update(self, p: torch.Tensor, group: dict[str, Any], casts: list[WeightCast]) -> Copies:
        assert p.grad is not None
        if p.grad.is_sparse:
            raise RuntimeError("AdamW does not take sparse gradients: use RowwiseAdagrad, or dense gradients")
        state = self._state(p, group)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        return self._run("adamw", p)(
            p, p.grad, state["exp_avg"], state["exp_avg_sq"], state.get("master"), step=int(state["step"]),
            lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
            maximize=group["maximize"], casts=casts,
        )  # fmt: skip


class RowwiseAdagrad(_FillingOptimizer):
    """Adagrad with one accumulator for each row, for embedding tables: state of 4 bytes a row instead of 4 an element.

    Args:
        params, model, master_weights, maximize, backend: as :class:`AdamW`.
        lr: as :class:`AdamW`.
        eps: added to the square root of the accumulator.
        weight_decay: L2, added to the gradient.
        initial_accumulator_value: where accumulators start.

    A row is everything along the last dimension; a 1-D parameter is one row. State: ``sum``, float32 ``[..., 1]``, as
    in torchrec. Sparse gradients (``nn.Embedding(sparse=True)``) update the rows they hold, with the same result as
    dense ones if ``weight_decay`` is 0; making them unique stalls the stream once, as in torch.

    Raises:
        ValueError: hyperparameters out of range.

    **Numerics.** In float32: ``sum += mean(g * g)``, ``p -= lr / (sqrt(sum) + eps) * g``, rounded once to a narrower
    parameter. Source: FBGEMM, EXACT_ROWWISE_ADAGRAD.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        *,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
        model: nn.Module | None = None,
        master_weights: bool = False,
        backend: str = "auto",
    ) -> None:
        _check_rate(lr)
        _check_at_least_zero(eps=eps, weight_decay=weight_decay, initial_accumulator_value=initial_accumulator_value)
        defaults = {
            "lr": lr, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
            "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults, model, backend)

    def _update(self, p: torch.Tensor, group: dict[str, Any], casts: list[WeightCast]) -> Copies:
        assert p.grad is not None
        if p.ndim == 0:
            raise ValueError("RowwiseAdagrad needs parameters of at least one dimension")
        state: dict[str, Any] = self.state[p]
        if not state:
            start, rows = group["initial_accumulator_value"], (*p.shape[:-1], 1)
            state["sum"] = torch.full(rows, start, dtype=_state_dtype(p), device=p.device)
        _add_master(state, p, group)
        run = self._run("rowwise_adagrad", p)
        options = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
        master = state.get("master")
        if not p.grad.is_sparse:
            return run(p, p.grad, state["sum"], master, casts=casts, **options)
        grad = p.grad.coalesce()
        (rows,) = grad.indices()
        whole = [p, state["sum"], *([] if master is None else [master])]
        part = [t[rows] for t in whole]
        run(part[0], grad.values(), part[1], part[2] if master is not None else None, casts=(), **options)
        for t, new in zip(whole, part, strict=True):
            t.index_copy_(0, rows, new)
        return []


def _is_plain(p: torch.Tensor) -> bool:
    """An ordinary dense tensor: no subclass such as DTensor, which kernels cannot address."""
    return type(p) in (torch.Tensor, nn.Parameter)


def _state_dtype(p: torch.Tensor) -> torch.dtype:
    return p.dtype if p.dtype == torch.float64 else torch.float32


def _add_master(state: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
    if group["master_weights"] and p.dtype.itemsize < 4 and "master" not in state:
        state["master"] = p.detach().to(torch.float32)


def _check_rate(lr: float | torch.Tensor) -> None:
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements: use one")
    elif lr < 0.0:
        raise ValueError(f"lr is {lr}: use a number >= 0")


def _check_at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if value < 0.0:
            raise ValueError(f"{name} is {value}: use a number >= 0")
