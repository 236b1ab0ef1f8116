"""The tests that only `make test-all` runs, each with a quick test of the same claim.

`make test` tests each claim once. The slow tests are the rest of a matrix (each fault, each documented command, each way
to stop), the same test in containers, or a fault in real time. `tests/test_slow.py` checks that the tests of every entry
exist, and that its quick test is not slow.
"""

from collections.abc import Iterable

PROOF = "tests/experiments/test_proofs.py::test_n_ranks_equal_one_process"
DRILL = "tests/tools/drill/test_drill.py"
# The beginning of the names of slow tests, and the quick test of the same claim.
SLOW = {
    # The other notebooks.
    **{
        f"tests/tools/notebook/test_notebooks.py::test_a_notebook_runs_from_top_to_bottom[{each}": (
            "tests/tools/notebook/test_notebooks.py::test_a_notebook_runs_from_top_to_bottom[1_talk]"
        )
        for each in ("2_data_parallel", "3_tensor_parallel", "4_pipeline", "5_zero")
    },
    # The other hangs and correct scripts with dumps.
    **{
        f"tests/tools/check/dump/test_hangs.py::{test}": f"tests/tools/check/dump/test_hangs.py::{test}[{quick}]"
        for test, quick in (
            ("test_a_dump_names_what_a_live_check_names", "group_order"),
            ("test_the_dumps_of_a_right_script_show_no_hang", "ddp"),
            ("test_the_script_of_a_dump_hangs_in_the_same_way", "missing"),
        )
    },
    # The same in containers.
    "tests/compose/test_bad_input.py::test_a_duplicate_rank_is_named_with_its_host": (
        "tests/lab/cluster/test_join.py::test_a_duplicate_rank_is_named_on_every_rank"
    ),
    "tests/compose/test_bad_input.py::test_an_unknown_master_address_is_named": (
        "tests/lab/cluster/test_join.py::test_an_unknown_address_fails_in_time"
    ),
    "tests/compose/test_check.py": "tests/tools/check/judge/test_hang.py::test_a_barrier_under_rank_0_is_a_hang[2]",
    "tests/compose/test_ci.py": "tests/docs/test_ci.py::test_the_steps_with_local_processes_return_their_codes[hangs]",
    "tests/compose/test_drills.py": "tests/lab/rank/test_fault_injection.py::test_each_fault_ends_the_run_with_its_exit_code[kill@300ms-3]",
    "tests/compose/test_elastic.py": (
        "tests/lab/cluster/test_elastic_processes.py::test_a_killed_rank_that_is_restarted_rejoins[2-restart]"
    ),
    "tests/compose/test_fit.py": (
        "tests/cli/test_fit.py::test_the_verdict_names_each_failed_condition[free dp fsdp-expected0]"
    ),
    "tests/compose/test_mine.py": "tests/test_mine.py::test_the_mode_is_proven_timed_counted_and_drawn",
    "tests/compose/test_net.py::test_a_run": (
        "tests/compose/test_net.py::test_a_slow_link_without_the_overlay_is_refused_with_the_command"
    ),
    "tests/compose/test_own.py": "tests/tools/prove/test_bugs.py::test_a_right_file_passes[by_hand-3]",
    "tests/compose/test_restart.py": (
        "tests/lab/checkpoint/test_resume.py::test_another_world_size_continues_the_losses[dp-bucketed,ddp-sizes5]"
    ),
    # The other entries of a matrix in containers.
    "tests/compose/test_commands.py::test_an_earlier_larger_cluster_is_removed_first": (
        "tests/compose/test_commands.py::test_a_run_leaves_only_files_of_the_owner"
    ),
    "tests/compose/test_commands.py::test_a_second_run_is_refused_and_the_first_continues": (
        "tests/test_run.py::test_a_second_run_in_a_clone_is_refused"
    ),
    "tests/compose/test_commands.py::test_a_stopped_run_removes_its_containers": (
        "tests/compose/test_commands.py::test_a_stopped_run_removes_its_containers[ctrl-c]"
    ),
    "tests/compose/test_commands.py::test_removed_containers_fail_the_run": (
        "tests/test_run.py::test_fewer_exit_codes_than_ranks_return_3"
    ),
    "tests/compose/test_commands.py::test_make_run_prints_the_exit_code": (
        "tests/compose/test_runs.py::test_a_failed_check_exits_1_on_every_rank"
    ),
    "tests/compose/test_commands.py::test_run_returns_3_and_prints_the_survivors_messages": (
        "tests/compose/test_faults.py::test_every_survivor_names_the_lost_rank[kill-0]"
    ),
    "tests/compose/test_faults.py": "tests/compose/test_faults.py::test_every_survivor_names_the_lost_rank[kill-0]",
    "tests/compose/test_runs.py::test_dp_passes_with_3_and_8_ranks": (
        "tests/compose/test_runs.py::test_dp_passes_with_3_and_8_ranks[3-]"
    ),
    "tests/compose/test_runs.py::test_other_modes_pass_with_three_ranks": (
        "tests/compose/test_runs.py::test_other_modes_pass_with_three_ranks[train-settings1]"
    ),
    "tests/docs/test_site.py::test_the_site_is_built": (
        "tests/docs/test_site.py::test_the_page_of_a_mode_lists_its_variants_and_formulas[dp]"
    ),
    "tests/docs/test_class.py::test_the_command_of_a_step": (
        "tests/docs/test_class.py::test_each_command_of_the_lessons_page_is_tested"
    ),
    # The rest of a matrix: other sizes, worlds, modes, screens and scripts of one kind.
    "tests/lab/checkpoint/test_resume.py::test_a_resumed_run_ends_in_the_same_weights_to_the_bit": (
        "tests/lab/checkpoint/test_resume.py::test_a_resumed_run_ends_in_the_same_weights_to_the_bit[fsdp]"
    ),
    "tests/experiments/test_bugs.py::test_every_check_passes_at_the_sizes_for_bugs": (
        "tests/experiments/test_bugs.py::test_every_check_passes_without_a_bug[cp]"
    ),
    "tests/experiments/test_compress.py::test_a_run_passes": "tests/experiments/test_compress.py::test_a_run_passes[line]",
    "tests/experiments/test_fsdp.py::test_a_run_passes": "tests/experiments/test_fsdp.py::test_a_run_passes[line]",
    "tests/experiments/test_moe.py::test_a_run_passes": "tests/experiments/test_moe.py::test_a_run_passes[drops]",
    f"{PROOF}[mesh 4": f"{PROOF}[mesh 4 LAB_MESH=pp2,tp2 LAB_OPTIMIZER=adamw LAB_TIE=1 LAB_CLIP=0.05]",
    f"{PROOF}[mesh 8": f"{PROOF}[mesh 6 LAB_MESH=pp2,cp3 LAB_OPTIMIZER=adamw LAB_TIE=1 LAB_CLIP=0.05]",
    f"{PROOF}[pp ": f"{PROOF}[pp 3]",
    f"{PROOF}[tp 4": f"{PROOF}[tp 3]",
    f"{PROOF}[tp 8": f"{PROOF}[tp 3]",
    "tests/experiments/test_proofs.py::test_each_bug_fails_only_its_variants[pp-": (
        "tests/experiments/test_proofs.py::test_each_bug_fails_only_its_variants[pp-stale_activation]"
    ),
    "tests/experiments/test_server.py::test_every_world_size_passes": (
        "tests/experiments/test_server.py::test_every_world_size_passes[3-settings3]"
    ),
    "tests/tools/prove/test_bugs.py::test_a_right_file_passes": (
        "tests/tools/prove/test_bugs.py::test_a_right_file_passes[by_hand-3]"
    ),
    f"{DRILL}::test_a_fault_is_named": f"{DRILL}::test_a_fault_is_named[loader_forgotten]",
    f"{DRILL}::test_a_fault_is_named[not_atomic": f"{DRILL}::test_a_fault_is_named[position_by_rank]",
    f"{DRILL}::test_its_corrected_version_passes": f"{DRILL}::test_its_corrected_version_passes[position_by_rank]",
    f"{DRILL}::test_a_right_script_passes": f"{DRILL}::test_its_corrected_version_passes[loader_forgotten]",
    **{
        f"{DRILL}::test_a_mode_of_the_lab_is_drilled[{mode}": f"{DRILL}::test_a_mode_of_the_lab_is_drilled[dp]"
        for mode in ("fsdp", "tp")
    },
    f"{DRILL}::test_a_missing_sample": f"{DRILL}::test_padding_of_a_sampler_is_not_lost_or_read_twice[1-0-1-0]",
    f"{DRILL}::test_the_scripts_that_mine_shows": f"{DRILL}::test_a_fault_is_named[loader_forgotten]",
    "tests/tools/puzzle/test_verify.py::test_a_reference_passes_with_each_number_of_ranks": (
        "tests/tools/puzzle/test_verify.py::test_a_reference_passes_with_each_number_of_ranks[15]"
    ),
    "tests/tools/puzzle/test_verify.py::test_a_wrong_answer_is_refused_for_its_reason": (
        "tests/tools/puzzle/test_verify.py::test_a_wrong_answer_is_refused_for_its_reason[13-3]"
    ),
    "tests/test_worlds.py::test_local_ranks_prove_their_gradients": (
        "tests/test_worlds.py::test_local_ranks_prove_their_gradients[dp-5-variants0]"
    ),
    "tests/lab/workload/test_user_model.py::test_a_users_model_runs_in_the_modes": (
        "tests/lab/workload/test_user_model.py::test_a_users_model_runs_in_the_modes[fsdp-settings1]"
    ),
    "tests/test_distlab.py::test_a_users_packages_do_not_disturb_a_run": (
        "tests/test_distlab.py::test_a_users_packages_do_not_disturb_a_check"
    ),
    "tests/test_distlab.py::test_a_users_packages_do_not_disturb_a_proof": (
        "tests/test_distlab.py::test_a_users_packages_do_not_disturb_a_check"
    ),
    # Every documented command.
    "tests/docs/test_outputs.py::test_a_block_equals_the_output_of_its_command": (
        "tests/docs/test_outputs.py::test_a_block_equals_the_output_of_its_command["
        "python -m distlab plan --params 7B --gpus 64 --gpu-memory 80GB]"
    ),
    "tests/docs/test_ci.py::test_the_steps_with_local_processes_return_their_codes": (
        "tests/docs/test_ci.py::test_the_steps_with_local_processes_return_their_codes[hangs]"
    ),
    # Faults in real time, and strangers.
    "tests/test_strangers.py::test_a_run_under_attack_ends_normally": (
        "tests/test_strangers.py::test_a_run_under_attack_ends_normally[gloo]"
    ),
    "tests/test_strangers.py::test_a_check_under_attack_has_the_same_findings": (
        "tests/test_strangers.py::test_a_check_under_attack_has_the_same_findings[check]"
    ),
    "tests/lab/cluster/test_elastic_processes.py": (
        "tests/lab/cluster/test_elastic_processes.py::test_a_killed_rank_that_is_restarted_rejoins[2-restart]"
    ),
    "tests/lab/rank/test_fault_injection.py::test_a_killed_rank_is_named_in_time": (
        "tests/lab/rank/test_fault_injection.py::test_a_killed_rank_is_named_in_time[dp]"
    ),
    "tests/lab/rank/test_fault_injection.py::test_each_fault_ends_the_run_with_its_exit_code": (
        "tests/lab/rank/test_fault_injection.py::test_each_fault_ends_the_run_with_its_exit_code[kill@300ms-3]"
    ),
    "tests/lab/cluster/test_watchdog.py::test_a_rank_declared_dead_that_wakes_changes_nothing": (
        "tests/lab/cluster/test_watchdog.py::test_a_rank_declared_dead_that_wakes_changes_nothing[server]"
    ),
    # Other ways to start the same.
    "tests/test_distlab.py::test_a_checkout_needs_no_install": "tests/test_distlab.py::test_a_checkout_needs_no_install[]",
    "tests/test_standard_streams.py::test_a_run_without_output_continues_and_logs_it": (
        "tests/test_standard_streams.py::test_a_run_without_output_continues_and_logs_it[| head -1-Broken pipe]"
    ),
    "tests/test_standard_streams.py::test_a_rank_of_a_launcher_continues_without_output": (
        "tests/test_standard_streams.py::test_a_rank_of_a_launcher_continues_without_output[| true]"
    ),
    "tests/test_standard_streams.py::test_the_stated_number_of_descriptors_is_enough": (
        "tests/test_standard_streams.py::test_the_stated_number_of_descriptors_is_enough[dp]"
    ),
    "tests/lab/checkpoint/test_resume.py::test_another_world_size_continues_the_losses": (
        "tests/lab/checkpoint/test_resume.py::test_another_world_size_continues_the_losses[dp-bucketed,ddp-sizes5]"
    ),
}

# Scripts for check: one per kind of fault, and others with the same kind.
FAULTS = {
    "missing": ("barrier_all_reduce", "extra", "in_except", "objects_apart", "swapped", "thread"),
    "shape": ("dims", "dtype", "reduce_op", "root"),
    "group_order": ("other_group",),
    "if_rank_0": ("fewer_batches",),
    "os_exit": ("sys_exit",),
    "save_rank_0": ("fsdp_some",),
    "send_send": ("wrong_peer",),
    "same_data": ("by_hand_same_data", "fsdp_same_data"),
    "epoch_of_rank_0": ("split_by_rank",),
    "in_flight": ("unwaited",),
    "transposed_on_one": ("columns_scattered",),
}
RIGHT = {"ddp-2": ("ddp_",), "pipe_gpipe-2": ("pipe_",), "gossip-4": ("local_sgd", "post_local_sgd")}
for table, test in ((FAULTS, "test_it_is_named"), (RIGHT, "test_a_right_script_has_no_finding")):
    begin = f"tests/tools/check/test_faults.py::{test}["
    SLOW |= {
        begin + other + ("]" if table is FAULTS else ""): f"{begin}{first}]"
        for first, others in table.items()
        for other in others
    }


def slow_of(names: Iterable[str]) -> set[str]:
    """Return those of these tests that `make test` skips."""
    quick = set(SLOW.values())
    return {name for name in names if name.startswith(tuple(SLOW)) and name not in quick}
