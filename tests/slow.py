"""The tests that `make test` leaves to `make test-all`, and for each a quick one that holds the same claim.

A claim is tested once in `make test`: what is here is the rest of a matrix (each fault, each documented command, each
way to stop), the same in containers, or a fault in real time. `tests/test_slow.py` sees that every entry names tests
that exist and a quick one that is not slow itself.
"""

from collections.abc import Iterable

PROOF = "tests/experiments/test_proofs.py::test_n_ranks_do_what_one_process_does"
DRILL = "tests/tools/drill/test_drill.py"
# The beginning of the names of slow tests: the test in which the claim is held in `make test`.
SLOW = {
    # The other notebooks.
    **{
        f"tests/tools/notebook/test_notebooks.py::test_a_notebook_runs_from_top_to_bottom[{each}": (
            "tests/tools/notebook/test_notebooks.py::test_a_notebook_runs_from_top_to_bottom[1_talk]"
        )
        for each in ("2_data_parallel", "3_tensor_parallel", "4_pipeline", "5_zero")
    },
    # The other hangs and right scripts of which dumps are made.
    **{
        f"tests/tools/check/dump/test_hangs.py::{test}": f"tests/tools/check/dump/test_hangs.py::{test}[{quick}]"
        for test, quick in (
            ("test_a_dump_names_what_a_live_check_names", "group_order"),
            ("test_the_dumps_of_a_right_script_show_no_hang", "ddp"),
            ("test_the_script_of_a_dump_hangs_in_the_same_way", "missing"),
        )
    },
    # The same in containers.
    "tests/compose/test_bad_input.py::test_a_doubled_rank_is_named_with_both_hosts": (
        "tests/lab/cluster/test_join.py::test_a_doubled_rank_is_said_on_every_rank"
    ),
    "tests/compose/test_bad_input.py::test_a_master_that_nobody_is": (
        "tests/lab/cluster/test_join.py::test_an_address_of_nobody_fails_in_time"
    ),
    "tests/compose/test_check.py": "tests/tools/check/judge/test_hang.py::test_a_barrier_under_rank_0_is_a_hang[2]",
    "tests/compose/test_ci.py": "tests/docs/test_ci.py::test_the_steps_of_local_processes[hangs]",
    "tests/compose/test_drills.py": "tests/lab/rank/test_fault_injection.py::test_each_fault_ends_as_it_should[kill@300ms-3]",
    "tests/compose/test_elastic.py": (
        "tests/lab/cluster/test_elastic_processes.py::test_who_is_killed_and_started_again_finds_its_way_back[2-restart]"
    ),
    "tests/compose/test_fit.py": (
        "tests/cli/test_fit.py::test_the_verdict_says_what_does_not_hold[free dp fsdp-expected0]"
    ),
    "tests/compose/test_mine.py": "tests/test_mine.py::test_it_is_proven_timed_counted_and_drawn_like_ours",
    "tests/compose/test_net.py::test_a_run": (
        "tests/compose/test_net.py::test_a_slow_link_without_the_overlay_is_refused_with_the_command"
    ),
    "tests/compose/test_own.py": "tests/tools/prove/test_bugs.py::test_a_right_file_is_left_alone[by_hand-3]",
    "tests/compose/test_restart.py": (
        "tests/lab/checkpoint/test_resume.py::test_another_world_size_reads_it_and_the_losses_go_on[dp-bucketed,ddp-sizes5]"
    ),
    # The other entries of a matrix in containers.
    "tests/compose/test_commands.py::test_a_larger_world_of_before_is_taken_down_first": (
        "tests/compose/test_commands.py::test_a_run_leaves_files_of_the_clones_owner_and_no_containers_and_is_removed"
    ),
    "tests/compose/test_commands.py::test_a_second_run_is_refused_and_the_first_goes_on": (
        "tests/test_run.py::test_a_second_run_in_a_clone_is_refused_and_touches_nothing"
    ),
    "tests/compose/test_commands.py::test_a_stopped_run_takes_the_cluster_down": (
        "tests/compose/test_commands.py::test_a_stopped_run_takes_the_cluster_down[ctrl-c]"
    ),
    "tests/compose/test_commands.py::test_containers_that_are_removed_while_they_run_are_no_success": (
        "tests/test_run.py::test_fewer_codes_than_ranks_are_a_broken_cluster"
    ),
    "tests/compose/test_commands.py::test_make_run_prints_the_code_that_make_cannot_return": (
        "tests/compose/test_runs.py::test_a_check_that_fails_is_exit_1_on_every_rank"
    ),
    "tests/compose/test_commands.py::test_run_returns_3_and_prints_the_late_words_of_survivors": (
        "tests/compose/test_faults.py::test_every_survivor_names_the_rank[kill-0]"
    ),
    "tests/compose/test_faults.py": "tests/compose/test_faults.py::test_every_survivor_names_the_rank[kill-0]",
    "tests/compose/test_runs.py::test_dp_holds_with_an_odd_world_and_the_largest": (
        "tests/compose/test_runs.py::test_dp_holds_with_an_odd_world_and_the_largest[3-]"
    ),
    "tests/compose/test_runs.py::test_the_other_modes_hold_with_three_ranks": (
        "tests/compose/test_runs.py::test_the_other_modes_hold_with_three_ranks[train-settings1]"
    ),
    "tests/docs/test_site.py::test_the_site_is_built": (
        "tests/docs/test_site.py::test_the_page_of_a_mode_has_all_that_the_code_says_of_it[dp]"
    ),
    "tests/docs/test_class.py::test_the_command_of_a_step": (
        "tests/docs/test_class.py::test_each_command_of_the_lessons_page_is_one_that_is_run"
    ),
    # The rest of a matrix: other sizes, worlds, modes, screens and scripts of one kind.
    "tests/lab/checkpoint/test_resume.py::test_a_resumed_run_ends_in_the_same_weights_to_the_bit": (
        "tests/lab/checkpoint/test_resume.py::test_a_resumed_run_ends_in_the_same_weights_to_the_bit[fsdp]"
    ),
    "tests/experiments/test_bugs.py::test_at_the_sizes_of_its_bugs_a_mode_makes_every_check_and_all_hold": (
        "tests/experiments/test_bugs.py::test_without_a_bug_every_check_holds[cp]"
    ),
    "tests/experiments/test_compress.py::test_a_run_holds": "tests/experiments/test_compress.py::test_a_run_holds[line]",
    "tests/experiments/test_fsdp.py::test_a_run_holds": "tests/experiments/test_fsdp.py::test_a_run_holds[line]",
    "tests/experiments/test_moe.py::test_a_run_holds": "tests/experiments/test_moe.py::test_a_run_holds[drops]",
    f"{PROOF}[mesh 4": f"{PROOF}[mesh 4 LAB_MESH=pp2,tp2 LAB_OPTIMIZER=adamw LAB_TIE=1 LAB_CLIP=0.05]",
    f"{PROOF}[mesh 8": f"{PROOF}[mesh 6 LAB_MESH=pp2,cp3 LAB_OPTIMIZER=adamw LAB_TIE=1 LAB_CLIP=0.05]",
    f"{PROOF}[pp ": f"{PROOF}[pp 3]",
    f"{PROOF}[tp 4": f"{PROOF}[tp 3]",
    f"{PROOF}[tp 8": f"{PROOF}[tp 3]",
    "tests/experiments/test_proofs.py::test_each_mistake_is_seen_where_it_is_made_and_only_there[pp-": (
        "tests/experiments/test_proofs.py::test_each_mistake_is_seen_where_it_is_made_and_only_there[pp-stale_activation]"
    ),
    "tests/experiments/test_server.py::test_every_world_comes_to_a_verdict": (
        "tests/experiments/test_server.py::test_every_world_comes_to_a_verdict[3-settings3]"
    ),
    "tests/tools/prove/test_bugs.py::test_a_right_file_is_left_alone": (
        "tests/tools/prove/test_bugs.py::test_a_right_file_is_left_alone[by_hand-3]"
    ),
    f"{DRILL}::test_what_is_wrong_is_named": f"{DRILL}::test_what_is_wrong_is_named[loader_forgotten]",
    f"{DRILL}::test_what_is_wrong_is_named[not_atomic": f"{DRILL}::test_what_is_wrong_is_named[position_by_rank]",
    f"{DRILL}::test_the_mended_twin_is_left_alone": f"{DRILL}::test_the_mended_twin_is_left_alone[position_by_rank]",
    f"{DRILL}::test_a_right_script_is_left_alone": f"{DRILL}::test_the_mended_twin_is_left_alone[loader_forgotten]",
    **{
        f"{DRILL}::test_a_mode_of_the_lab_is_drilled[{mode}": f"{DRILL}::test_a_mode_of_the_lab_is_drilled[dp]"
        for mode in ("fsdp", "tp")
    },
    f"{DRILL}::test_one_sample_less_than": f"{DRILL}::test_what_a_sampler_pads_is_counted[1-0-1-0]",
    f"{DRILL}::test_the_scripts_that_mine_shows": f"{DRILL}::test_what_is_wrong_is_named[loader_forgotten]",
    "tests/tools/puzzle/test_verify.py::test_a_reference_passes_with_each_number_of_ranks": (
        "tests/tools/puzzle/test_verify.py::test_a_reference_passes_with_each_number_of_ranks[15]"
    ),
    "tests/tools/puzzle/test_verify.py::test_a_wrong_answer_is_refused_for_its_reason": (
        "tests/tools/puzzle/test_verify.py::test_a_wrong_answer_is_refused_for_its_reason[13-3]"
    ),
    "tests/test_worlds.py::test_local_ranks_prove_their_gradients": (
        "tests/test_worlds.py::test_local_ranks_prove_their_gradients[dp-5-variants0]"
    ),
    "tests/lab/workload/test_user_model.py::test_an_own_model_runs_in_the_modes": (
        "tests/lab/workload/test_user_model.py::test_an_own_model_runs_in_the_modes[fsdp-settings1]"
    ),
    "tests/test_distlab.py::test_packages_of_the_users_own_do_not_disturb_a_run": (
        "tests/test_distlab.py::test_packages_of_the_users_own_do_not_disturb_a_check"
    ),
    "tests/test_distlab.py::test_packages_of_the_users_own_do_not_disturb_a_proof": (
        "tests/test_distlab.py::test_packages_of_the_users_own_do_not_disturb_a_check"
    ),
    # Every documented command.
    "tests/docs/test_outputs.py::test_a_block_is_what_its_command_prints": (
        "tests/docs/test_outputs.py::test_a_block_is_what_its_command_prints["
        "python -m distlab plan --params 7B --gpus 64 --gpu-memory 80GB]"
    ),
    "tests/docs/test_ci.py::test_the_steps_of_local_processes": (
        "tests/docs/test_ci.py::test_the_steps_of_local_processes[hangs]"
    ),
    # Faults in real time, and strangers.
    "tests/test_strangers.py::test_a_run_under_attack_ends_as_any_other": (
        "tests/test_strangers.py::test_a_run_under_attack_ends_as_any_other[gloo]"
    ),
    "tests/test_strangers.py::test_a_doctor_under_attack_finds_what_it_finds": (
        "tests/test_strangers.py::test_a_doctor_under_attack_finds_what_it_finds[check]"
    ),
    "tests/lab/cluster/test_elastic_processes.py": (
        "tests/lab/cluster/test_elastic_processes.py::test_who_is_killed_and_started_again_finds_its_way_back[2-restart]"
    ),
    "tests/lab/rank/test_fault_injection.py::test_a_killed_rank_is_named_in_time": (
        "tests/lab/rank/test_fault_injection.py::test_a_killed_rank_is_named_in_time[dp]"
    ),
    "tests/lab/rank/test_fault_injection.py::test_each_fault_ends_as_it_should": (
        "tests/lab/rank/test_fault_injection.py::test_each_fault_ends_as_it_should[kill@300ms-3]"
    ),
    "tests/lab/cluster/test_watchdog.py::test_who_was_declared_dead_and_wakes_while_the_report_is_drawn_changes_nothing": (
        "tests/lab/cluster/test_watchdog.py::"
        "test_who_was_declared_dead_and_wakes_while_the_report_is_drawn_changes_nothing[server]"
    ),
    # Other ways to start the same.
    "tests/test_distlab.py::test_a_checkout_needs_no_install": "tests/test_distlab.py::test_a_checkout_needs_no_install[]",
    "tests/test_standard_streams.py::test_a_run_without_an_output_goes_on_and_says_so_in_its_log": (
        "tests/test_standard_streams.py::test_a_run_without_an_output_goes_on_and_says_so_in_its_log["
        "| head -1-Broken pipe]"
    ),
    "tests/test_standard_streams.py::test_a_rank_that_an_engine_starts_goes_on_without_its_output": (
        "tests/test_standard_streams.py::test_a_rank_that_an_engine_starts_goes_on_without_its_output[| true]"
    ),
    "tests/test_standard_streams.py::test_as_many_as_are_said_to_be_needed_are_enough": (
        "tests/test_standard_streams.py::test_as_many_as_are_said_to_be_needed_are_enough[dp]"
    ),
    "tests/lab/checkpoint/test_resume.py::test_another_world_size_reads_it_and_the_losses_go_on": (
        "tests/lab/checkpoint/test_resume.py::test_another_world_size_reads_it_and_the_losses_go_on[dp-bucketed,ddp-sizes5]"
    ),
}

# Scripts under check: the first of a kind, and others whose fault is of that kind.
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
    """Those of these tests that `make test` leaves out."""
    quick = set(SLOW.values())
    return {name for name in names if name.startswith(tuple(SLOW)) and name not in quick}
