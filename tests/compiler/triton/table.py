"""The corpus on the Triton compiler: which cases it refuses, and why. All others compile for sm_80, sm_90 and sm_100.

The one exception is float8_e4m3fn, which sm_80 does not have. Most of the corpus is refused for its sizes: the cases
are of sizes that are no powers of two on purpose. `kernels.py` holds their operations in sizes that are.
"""

import jax

import corpus
from palladion.compiler.entry import _calls_in
from palladion.compiler.triton.module import lower_call

POWER, EMPTY, UNSET, DTYPE, OPERATION = (
    "sizes that are no powers of two",
    "a block without elements",
    "scratch that nobody has stored in",
    "a dtype that Triton does not have",
    "an operation without a rule",
)
REFUSED_BECAUSE = {
    "sizes that are no powers of two": """
        special_values next_after rearranged_values dynamic_values gathered_values scattered_values five_dimensions
        zero_dimensions arg_reductions softmax_rows layer_norm rms_norm ragged_sum_unmasked
        prefix_scan_by_doubling sort_rows sort_pairs top_k histogram matmul_loop_inside dot_general_forms
        batched_dot batch_in_the_grid matmul_grouped decode_attention gather_rows_by_prefetch convolutions
        stencil_with_halo squeezed_dimensions element_windows element_padding element_output whole_beside_blocks
        whole_output_in_a_grid memory_space_any default_index_map program_ids_3d grid_of_one permuted_prime
        modular_map aliases_blockwise prefetch_with_scratch printing read_static_integers read_static_slices
        read_dynamic_slices read_strided read_out_of_range read_integer_arrays read_mixed_arrays read_masks
        read_views read_reshaped read_bitcast read_transposed read_by_functions read_within_blocks write_slices
        write_strided write_out_of_range write_integer_arrays add_to_repeated_rows write_masks masked_store
        write_views write_transposed write_bitcast read_modify_write partial_stores_to_ragged_blocks fori_rows
        scan_carried_and_stacked loop_decorator vmap_inside map_and_reduce checks_that_hold scoped_nested_in_loop
        kernel_float64 sum_of_everything matmul_int8 dynamic_grid_reduction outputs_of_two_kinds
    """,
    "a block without elements": """
        empty_operand
    """,
    "scratch that nobody has stored in": """
        scratch_tuple scoped_value
    """,
    "a dtype that Triton does not have": """
        four_bit_integers
    """,
}
REFUSED = {name: reason for reason, names in REFUSED_BECAUSE.items() for name in names.split()}
# Their results show what nobody has stored (NaN in the reference, anything on a GPU), the last of several programs'
# stores in one block, of which the report warns, or what another program stored in an aliased input.
NOT_THE_VALUES = frozenset(
    {name for name, case in corpus.CASES.items() if case.tags & {"uninit", "padding"}}
    | {"last_visit_stays", "block_comes_back", "alias_recurrence"}
)


def why_refused(case: corpus.Case) -> str | None:
    """The reason why a case is not lowered for sm_90, in the words of the table; None if it is."""
    with corpus.scope(case):
        traced = jax.make_jaxpr(case.make())(*corpus.arguments(case))
        try:
            for call in _calls_in(traced.jaxpr):
                lower_call(call.params, 90)
        except (ValueError, TypeError, NotImplementedError) as error:
            return _reason(str(error))
    return None


def _reason(message: str) -> str:
    first = message.splitlines()[0]
    for words, reason in (
        ("power of two", POWER),
        ("without elements; Triton holds none", EMPTY),
        ("is read before the program has stored", UNSET),
        ("which Triton does not have", DTYPE),
        ("is not supported in a kernel", OPERATION),
    ):
        if words in first:
            return reason
    return first
