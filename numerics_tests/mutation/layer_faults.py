"""Faults in linear layers, the weight cache, policies and attention."""

from __future__ import annotations

from numerics_tests.mutation.faults import Fault

LAYER_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="hadamard_seed_per_operand",
        file="mxfp8/linear.py",
        old="hadamard_seed=self.recipe.seed,",
        new='hadamard_seed=self.recipe.seed + (operand == "input"),',
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="the two transforms of wgrad do not cancel",
    ),
    Fault(
        name="stream_shared_by_operands",
        file="mxfp8/linear.py",
        old="_stream(self.layer, _STREAMS[gemm, operand])",
        new="_stream(self.layer, 0)",
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="two operands round with the same bits",
    ),
    Fault(
        name="stream_without_the_layer",
        file="mxfp8/linear.py",
        old="zlib.crc32(layer.encode()) + operand",
        new="operand",
        test="numerics_tests/test_linear.py::test_stochastic_bits_depend_on_step_and_name_and_on_nothing_else",
        why="all layers round with the same bits",
    ),
    Fault(
        name="layer_step_ignored",
        file="mxfp8/linear.py",
        old="else get_step()",
        new="else 0",
        test="numerics_tests/test_linear.py::test_stochastic_bits_depend_on_step_and_name_and_on_nothing_else",
        why="every step rounds the same way",
    ),
    Fault(
        name="rule_of_the_recipe_ignored",
        file="mxfp8/linear.py",
        old="second.block, first.scale_rule)",
        new='second.block, "rceil")',
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="a floor recipe runs rceil",
    ),
    Fault(
        name="rule_of_the_recipe_ignored_in_evaluation",
        file="mxfp8/linear.py",
        old="x, axis, spec.fmt, spec.block, spec.scale_rule, spec.rounding, key,",
        new='x, axis, spec.fmt, spec.block, "rceil", spec.rounding, key,',
        test="numerics_tests/test_linear.py::test_a_forward_without_gradients_has_the_same_bits",
        why="a floor recipe is evaluated as rceil",
    ),
    Fault(
        name="rule_of_the_weight_ignored",
        file="mxfp8/weight_cache.py",
        old="columns.block, rows.scale_rule)",
        new="columns.block)",
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="a recipe's rule for weights has no effect",
    ),
    Fault(
        name="weight_narrowed_first",
        file="mxfp8/weight_cache.py",
        old="    if len(keys) == 2:\n",
        new="    weight = weight.detach().bfloat16()\n    if len(keys) == 2:\n",
        test="numerics_tests/test_linear.py::test_every_cast_is_from_high_precision_by_its_own_spec",
        why="master weights are rounded twice",
    ),
    Fault(
        name="wgrad_from_the_fprop_copy",
        file="mxfp8/linear.py",
        old='x_fprop, x_wgrad = plan.cast_both(x, ("fprop", "input"), ("wgrad", "input"))',
        new=(
            'x_fprop, x_wgrad = plan.cast_both(x, ("fprop", "input"), ("wgrad", "input"))\n'
            "        if isinstance(x_fprop, MXTensor):\n"
            '            x_wgrad = plan.cast(x_fprop.dequantize(x.dtype), "wgrad", "input", axis=-2)'
        ),
        test="numerics_tests/test_linear.py::test_every_cast_is_from_high_precision_by_its_own_spec",
        why="activations are quantised twice",
    ),
    Fault(
        name="dgrad_from_the_fprop_copy",
        file="mxfp8/linear.py",
        old="        copies = cache.get(weight, plan.weights)\n",
        new=(
            "        copies = list(cache.get(weight, plan.weights))\n"
            "        if len(copies) == 2:\n"
            "            copies[1] = quantize_weights(copies[0].dequantize(), plan.weights[1:])[0]\n"
        ),
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="weights are quantised twice",
    ),
    Fault(
        name="wgrad_from_the_dgrad_copy",
        file="mxfp8/linear.py",
        old='dw = plan.gemm("wgrad", dy_wgrad.mT',
        new=(
            "if isinstance(dy_dgrad, MXTensor):\n"
            "            again = rounded(dy_dgrad.dequantize(), dy.dtype)\n"
            '            dy_wgrad = plan.cast(again, "wgrad", "grad_output", axis=-2)\n'
            '        dw = plan.gemm("wgrad", dy_wgrad.mT'
        ),
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="gradients are quantised twice",
    ),
    Fault(
        name="dgrad_blocks_along_the_rows",
        file="mxfp8/linear.py",
        old="        self.watch_cast(*rows, x, q)\n",
        new=(
            '        if rows[0] == "dgrad":\n'
            "            q = ops.quantize(x, -2, first.fmt, first.block, first.scale_rule)\n"
            "        self.watch_cast(*rows, x, q)\n"
        ),
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="dgrad contracts over N, its blocks run along M",
    ),
    Fault(
        name="two_casts_in_one_whatever_their_rounding",
        file="mxfp8/linear.py",
        old="    return all((spec.fmt, ",
        new="    return True or all((spec.fmt, ",
        test="numerics_tests/test_linear.py::test_every_cast_is_from_high_precision_by_its_own_spec",
        why="gradients that were to be rounded stochastically are rounded to nearest",
    ),
    Fault(
        name="wgrad_blocks_along_the_columns",
        file="mxfp8/linear.py",
        old='dw = plan.gemm("wgrad", dy_wgrad.mT',
        new=('dy_wgrad = plan.cast(dy, "wgrad", "grad_output", axis=-1)\n        dw = plan.gemm("wgrad", dy_wgrad.mT'),
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="wgrad contracts over M, its blocks run along N",
    ),
    Fault(
        name="weight_gradient_in_bf16",
        file="mxfp8/linear.py",
        old=".mT, x_wgrad.mT, w_dtype)",
        new=".mT, x_wgrad.mT, x_dtype)",
        test="numerics_tests/test_linear.py::test_narrow_inputs",
        why="gradients of float32 weights are rounded to bf16",
    ),
    Fault(
        name="input_gradient_in_fp16",
        file="mxfp8/linear.py",
        old="w_dgrad.mT, x_dtype)",
        new="w_dgrad.mT, torch.float16)",
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="input gradients overflow",
    ),
    Fault(
        name="bias_gradient_in_bf16",
        file="mxfp8/linear.py",
        old="db = dy.contiguous().sum(0, dtype=torch.float32)",
        new="db = dy.contiguous().sum(0)",
        test="numerics_tests/test_linear.py::test_narrow_inputs",
        why="the gradient of a float32 bias is rounded to bf16",
    ),
    Fault(
        name="bias_gradient_misses_rows",
        file="mxfp8/linear.py",
        old="db = dy.contiguous().sum(0, dtype",
        new="db = dy[: len(dy) // 32 * 32].sum(0, dtype",
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="a batch that is no multiple of 32 loses rows",
    ),
    Fault(
        name="bias_gradient_dropped",
        file="mxfp8/linear.py",
        old="if bias_dtype is not None and needed[2]:",
        new="if bias_dtype is None:",
        test="numerics_tests/test_linear.py::test_gemms_against_the_composition",
        why="biases do not train",
    ),
    Fault(
        name="skip_ignored",
        file="mxfp8/linear.py",
        old="and not recipe.wgrad.skip",
        new="",
        test="numerics_tests/test_linear.py::test_skipped_wgrad_leaves_no_gradient",
        why="a skipped wgrad is computed",
    ),
    Fault(
        name="autocast_ignored",
        file="mxfp8/linear.py",
        old="x = x.to(torch.get_autocast_dtype(kind))",
        new="x = x + 0",
        test="numerics_tests/test_linear.py::test_autocast_gives_the_dtypes_of_nn_linear",
        why="float32 inputs stay float32 under autocast",
    ),
    Fault(
        name="fp32_output",
        file="mxfp8/linear.py",
        old='y = plan.gemm("fprop", x_fprop, w_fprop, x.dtype, bias)',
        new='y = plan.gemm("fprop", x_fprop, w_fprop, torch.float32, bias)',
        test="numerics_tests/test_linear.py::test_narrow_inputs",
        why="activations double in size",
    ),
    Fault(
        name="layers_share_their_hooks",
        file="mxfp8/linear.py",
        old="value.copy() if isinstance(value, (dict, set)) else value",
        new="value",
        test="numerics_tests/test_linear.py::test_mode_and_hooks_survive_conversion_both_ways",
        why="a hook on one layer runs on the other too",
    ),
    Fault(
        name="copies_share_the_cache",
        file="mxfp8/linear.py",
        old='return {**self.__dict__, "_cache": WeightCache()}\n\n\ndef _rewrap(',
        new="return dict(self.__dict__)\n\n\ndef _rewrap(",
        test="numerics_tests/test_linear.py::test_copies_compute_the_same_and_share_nothing",
        why="caches travel with copies and files",
    ),
    Fault(
        name="converted_weights_are_copies",
        file="mxfp8/linear.py",
        old="out: MXFP8Linear = _rewrap(linear, cls)",
        new='out: MXFP8Linear = _rewrap(__import__("copy").deepcopy(linear), cls)',
        test="numerics_tests/test_convert.py::test_tied_weights_stay_tied_through_training_and_copies",
        why="ties break, optimisers train the old weight",
    ),
    Fault(
        name="stale_after_in_place_writes",
        file="mxfp8/weight_cache.py",
        old="return weight._version, weight.data_ptr()",
        new="return weight.data_ptr()",
        test="numerics_tests/test_weight_cache.py::test_a_changed_weight_is_cast_again",
        why="the cached cast outlives weight.mul_() where there is no snapshot",
    ),
    Fault(
        name="stale_after_assigning_data",
        file="mxfp8/weight_cache.py",
        old="weight._version, weight.data_ptr(), weight.dtype",
        new="weight._version, weight.dtype",
        test="numerics_tests/test_weight_cache.py::test_a_changed_weight_is_cast_again",
        why="the cached cast outlives weight.data = new",
    ),
    Fault(
        name="stale_after_a_step",
        file="mxfp8/weight_cache.py",
        old="weight.device, steps",
        new="weight.device, 0",
        test=("numerics_tests/test_weight_cache.py::test_averaged_weights_written_through_data_follow_each_step"),
        why="averaging and sharding code write behind autograd's back",
    ),
    Fault(
        name="stale_after_data_writes",
        file="mxfp8/weight_cache.py",
        old="return self._snapshot is None or torch.equal(_bits(weight), self._snapshot)",
        new="return True",
        test="numerics_tests/test_weight_cache.py::test_a_changed_weight_is_cast_again",
        why="the cached cast outlives weight.data.mul_()",
    ),
    Fault(
        name="stale_after_a_new_recipe",
        file="mxfp8/weight_cache.py",
        old="            if known is keys:",
        new="            if len(known) == len(keys):",
        test="numerics_tests/test_weight_cache.py::test_a_changed_weight_is_cast_again",
        why="another recipe is served the old cast",
    ),
    Fault(
        name="stale_by_snapshot_alias",
        file="mxfp8/weight_cache.py",
        old="self._snapshot = _bits(weight).clone() if",
        new="self._snapshot = _bits(weight) if",
        test="numerics_tests/test_weight_cache.py::test_a_changed_weight_is_cast_again",
        why="the snapshot is a view of the weight and always equal",
    ),
    Fault(
        name="nothing_is_cached",
        file="mxfp8/weight_cache.py",
        old="        if not self._is_current(weight):\n",
        new="        if True:\n",
        test="numerics_tests/test_weight_cache.py::test_a_weight_is_cast_once_per_optimiser_step",
        why="each micro-batch casts every weight again",
    ),
    Fault(
        name="cached_inference_tensor",
        file="mxfp8/weight_cache.py",
        old="or torch.is_inference_mode_enabled() ",
        new="",
        test="numerics_tests/test_weight_cache.py::test_evaluating_in_inference_mode_does_not_spoil_training",
        why="evaluation leaves casts that autograd refuses",
    ),
    Fault(
        name="step_not_counted",
        file="mxfp8/rng.py",
        old="set_step(get_step() + 1)",
        new="set_step(get_step())",
        test="numerics_tests/test_stochastic.py::test_the_step_counts_optimiser_steps_and_can_be_set",
        why="stochastic rounding repeats itself",
    ),
    Fault(
        name="last_rule_wins",
        file="mxfp8/policy.py",
        old="next((i for i in range(len(covered)) if",
        new="next((i for i in reversed(range(len(covered))) if",
        test="numerics_tests/test_policy.py::test_first_rule_wins_over_every_kind_of_target",
        why="the order of rules is reversed",
    ),
    Fault(
        name="rules_match_parts_of_words",
        file="mxfp8/rules.py",
        old="fnmatchcase(parts[0], first)",
        new='fnmatchcase(parts[0], f"*{first}*")',
        test="numerics_tests/test_policy.py::test_names_match_by_whole_components",
        why="'head' covers 'overhead'",
    ),
    Fault(
        name="star_matches_nothing",
        file="mxfp8/rules.py",
        old='fewest = 1 if first == "*" else 0',
        new="fewest = 0",
        test="numerics_tests/test_policy.py::test_names_match_by_whole_components",
        why="'head.*' covers 'head'",
    ),
    Fault(
        name="misspelt_rule_is_silent",
        file="mxfp8/policy.py",
        old="    if not covered:\n",
        new="    if not covered and not rule.is_bf16:\n",
        test="numerics_tests/test_policy.py::test_rule_without_effect_is_an_error_and_changes_nothing",
        why="a layer meant for BF16 runs in MXFP8",
    ),
    Fault(
        name="only_k_is_checked",
        file="mxfp8/rules.py",
        old="k % self.not_multiple_of != 0 or n % self.not_multiple_of != 0",
        new="k % self.not_multiple_of != 0",
        test="numerics_tests/test_policy.py::test_shape_covers",
        why="layers with a ragged N are converted",
    ),
    Fault(
        name="first_layers_for_last",
        file="mxfp8/policy.py",
        old="[-count:]",
        new="[:count]",
        test="numerics_tests/test_policy.py::test_first_rule_wins_over_every_kind_of_target",
        why="the first layers stay in BF16 instead of the last",
    ),
    Fault(
        name="filter_inverted",
        file="mxfp8/policy.py",
        old="and not filter_fn(module, names[0])",
        new="and filter_fn(module, names[0])",
        test="numerics_tests/test_convert.py::test_filter_is_used_and_an_excluded_layer_is_left_as_it_is",
        why="what was excluded is converted",
    ),
    Fault(
        name="subclasses_converted",
        file="mxfp8/policy.py",
        old="if type(module) not in (nn.Linear, MXFP8Linear):",
        new="if not isinstance(module, (nn.Linear, MXFP8Linear)):",
        test="numerics_tests/test_convert.py::test_what_cannot_be_converted_is_left_with_its_reason",
        why="a subclass loses its own forward",
    ),
    Fault(
        name="observer_stays",
        file="mxfp8/observe.py",
        old="_observers.remove(observer)",
        new="_observers.reverse()",
        test="numerics_tests/test_mutation_gaps.py::test_watching_ends_with_its_block_and_only_for_its_observer",
        why="watching never ends",
    ),
    Fault(
        name="shared_stochastic_copy",
        file="mxfp8/recipe.py",
        old='and spec.is_square and spec.rounding == "nearest"',
        new="and spec.is_square",
        test="numerics_tests/test_recipe.py::test_what_can_be_shared",
        why="fprop and wgrad share their random bits",
    ),
    Fault(
        name="window_one_too_narrow",
        file="mxfp8/reference/attention.py",
        old="distance >= -left",
        new="distance > -left",
        test=(
            "numerics_tests/test_attention.py::test_jagged_attention_and_its_gradients_are_those_of_each_sample_alone"
        ),
        why="the oldest key of each window is lost",
    ),
    Fault(
        name="window_one_too_wide",
        file="mxfp8/reference/attention.py",
        old="distance <= right",
        new="distance <= right + 1",
        test=(
            "numerics_tests/test_attention.py::test_jagged_attention_and_its_gradients_are_those_of_each_sample_alone"
        ),
        why="causal attention sees the next token",
    ),
    Fault(
        name="window_not_aligned",
        file="mxfp8/reference/attention.py",
        old="[:, None] + (len_k - len_q)",
        new="[:, None]",
        test=(
            "numerics_tests/test_attention.py::test_jagged_attention_and_its_gradients_are_those_of_each_sample_alone"
        ),
        why="with more keys than queries windows look too far back",
    ),
    Fault(
        name="mask_after_softmax",
        file="mxfp8/reference/attention.py",
        old=(
            "        logits = logits.masked_fill(~allowed & alive, -torch.inf)\n"
            "        return logits.softmax(-1).masked_fill(~alive, 0.0)"
        ),
        new="        return logits.softmax(-1).masked_fill(~allowed, 0.0)",
        test=(
            "numerics_tests/test_attention.py::test_jagged_attention_and_its_gradients_are_those_of_each_sample_alone"
        ),
        why="weights do not add up to one",
    ),
    Fault(
        name="softmax_without_maximum",
        file="mxfp8/reference/attention.py",
        old="            return logits.softmax(-1)\n",
        new="            return logits.exp() / logits.exp().sum(-1, keepdim=True)\n",
        test="numerics_tests/test_attention.py::test_large_and_very_negative_logits_stay_exact",
        why="large logits overflow, very negative ones give 0 / 0",
    ),
    Fault(
        name="permutation_not_inverted",
        file="mxfp8/reference/attention.py",
        old="return _permute(grad, inverse, order), None, None",
        new="return _permute(grad, order, inverse), None, None",
        test=(
            "numerics_tests/test_attention.py::test_jagged_attention_and_its_gradients_are_those_of_each_sample_alone"
        ),
        why="gradients go to other rows",
    ),
    Fault(
        name="blocks_overlap",
        file="mxfp8/reference/attention.py",
        old="+ nth * block",
        new="+ nth * (block - 1)",
        test="numerics_tests/test_attention.py::test_block_attention_sees_its_own_block_only",
        why="attention blocks share a token",
    ),
    Fault(
        name="attention_scale",
        file="mxfp8/reference/attention.py",
        old="q.shape[-1] ** -0.5 if scale is None",
        new="q.shape[1] ** -0.5 if scale is None",
        test=(
            "numerics_tests/test_attention.py::test_jagged_attention_and_its_gradients_are_those_of_each_sample_alone"
        ),
        why="logits are scaled by the number of heads",
    ),
    Fault(
        name="attention_in_bf16",
        file="mxfp8/reference/attention.py",
        old="compute = torch.promote_types(v.dtype, torch.float32)",
        new="compute = v.dtype",
        test="numerics_tests/test_attention.py::test_low_precision_inputs_cost_one_rounding_of_the_output",
        why="weights are rounded to bf16",
    ),
)
