"""Faults in casts, products and layers of groups of rows."""

from __future__ import annotations

from numerics_tests.mutation.faults import Fault

GROUP_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="groups_overlap",
        file="mxfp8/reference/gemm.py",
        old="            start = stop\n",
        new="",
        test="numerics_tests/test_grouped.py::test_grouped_gemm",
        why="later groups overwrite earlier rows",
    ),
    Fault(
        name="group_off_by_one",
        file="mxfp8/reference/gemm.py",
        old="right[g].mT",
        new="right[g - 1].mT",
        test="numerics_tests/test_grouped.py::test_grouped_gemm",
        why="each group is multiplied by its neighbour's matrix",
    ),
    Fault(
        name="trailing_rows_not_zero",
        file="mxfp8/reference/gemm.py",
        old="out = left.new_zeros(left.shape[0], right.shape[1])",
        new="out = left.new_ones(left.shape[0], right.shape[1])",
        test="numerics_tests/test_grouped.py::test_grouped_gemm",
        why="rows past the last group hold garbage",
    ),
    Fault(
        name="offsets_beyond_the_rows",
        file="mxfp8/reference/grouped.py",
        old="if not before <= end <= rows:",
        new="if not before <= end:",
        test="numerics_tests/test_grouped.py::test_bad_offsets_are_named",
        why="group ends outside the tensor pass",
    ),
    Fault(
        name="shared_gradient_offset",
        file="mxfp8/reference/grouped.py",
        old="own = None if key is None else key.at(start)",
        new="own = key",
        test="numerics_tests/test_grouped.py::test_layer_against_the_composition",
        why="all experts round with the same bits",
    ),
    Fault(
        name="groups_checked_once",
        file="mxfp8/grouped.py",
        old="    offs, groups = ops.check_offsets(offs, weight.shape[0], x), None\n",
        new="    groups = None\n",
        test="numerics_tests/test_layer_replays.py::test_bad_groups_are_refused_beside_replays",
        why="a layer takes groups that end outside its rows",
    ),
    Fault(
        name="compiled_groups_unchecked",
        file="mxfp8/dispatch/compiled_grouped.py",
        old='    kernel("check_offsets", backend, offs.device)(offs, rows)\n',
        new="",
        test="numerics_tests/test_compile_grouped.py::test_bad_groups_are_refused_in_a_graph",
        why="under torch.compile groups that end outside the rows pass",
    ),
    Fault(
        name="replay_forgets_the_groups",
        file="mxfp8/grouped.py",
        old="made = replays.run(known, lambda: _forward(plan, x, w_fprop, offs), read)",
        new="made = replays.run(known, lambda offs=offs.clone(): _forward(plan, x, w_fprop, offs), read)",
        test="numerics_tests/test_layer_replays.py::test_grouped_passes_are_replayed_whatever_the_groups_are",
        why="nothing is replayed, or the groups of an earlier step are",
    ),
    Fault(
        name="gradient_cast_in_the_input_s_blocks",
        file="mxfp8/grouped.py",
        old="x, offs, fmt=fmt, block=first.block, column_block=second.block,",
        new="x, offs, fmt=fmt, block=first.block, column_block=first.block,",
        test="numerics_tests/test_grouped.py::test_layer_against_the_composition",
        why="one pass takes one block for both directions",
    ),
)
