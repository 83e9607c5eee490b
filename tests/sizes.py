"""Which tests run when: ``./setup.sh check``, ``test``, ``test all`` (what CI runs) and ``nightly``.

========  =====================================================================
check     ``tests/unit`` but for ``SLOW``
test      everything but ``SLOW`` and live tests, and of those the ones in ``CORE``
test all  everything but ``soak``: what is marked so in its file, and ``NIGHTLY``
nightly   ``soak``
========  =====================================================================

Tests are named by file (file names are unique in ``tests``), ``file::function`` or ``file::function[parameters]``.
``tests/unit/test_sizes.py`` fails where one of them is not there.
"""

import pathlib

import pytest

#: Tests that are not live and that ``check`` and ``test`` leave out, with the CPU seconds that they take.
SLOW = {
    "test_analytic.py": 43,
    "test_every_family.py::test_it_trains_is_exported_and_reloaded_as_transformers_computes_it": 110,
    "test_stragglers.py::test_random_virtual_runs_are_judged_right": 4,
    "test_gke_provision.py::test_every_request_may_go_wrong_once": 8,
    "test_reference_case.py": 17,
    "test_gke_provision.py::test_killed_after_every_request_and_run_again": 35,
    "test_plan_search.py::test_an_impossible_wish_gets_the_nearest_plan": 11,
    "test_identity.py::test_identity_closes_over_runs_that_could_be": 10,
    "test_gce_launcher.py::test_each_request_of_a_submit_may_go_wrong_in_each_way": 90,
    "test_gce_launcher.py::test_submit_killed_after_every_request": 5,
    "test_gce_launcher.py::test_down_killed_after_every_request": 5,
    "test_gce_provision.py::test_down_killed_after_every_request_leaves_nothing": 6,
    "test_gce_provision.py::test_each_request_may_go_wrong_in_each_way": 25,
    "test_gke_provision_places.py": 10,
    "test_gke_provision.py::test_down_after_any_partial_up_leaves_nothing": 18,
    "test_gke_provision_pools.py::test_growing_may_be_killed_at_any_request": 12,
    "test_gke_provision_private.py::test_killed_at_any_request_and_run_again_and_taken_down": 8,
    "test_gke_provision_private.py::test_down_killed_at_any_request_and_run_again": 5,
    "test_plan_use_case.py::test_impossible_wishes_end_with_exit_code_3": 7,
    "test_second_try.py": 16,
    "test_ci_ends.py": 40,
    "test_sql_execution.py::test_huge_strings_are_refused": 6,
    "test_judge.py::test_a_slow_gold_query_is_said_to_be_one": 6,
    "test_judge.py::test_it_ends_with_its_caller": 3,
    "test_text2sql_generator.py::test_heldout_tables_never_occur_in_training": 6,
    "test_gke_provision.py::test_down_killed_after_every_request_and_run_again": 9,
    "test_identity.py::test_identity_closes_over_events_in_any_order": 4,
    "test_text2sql_generator.py::test_levels_hold_what_they_promise": 4,
    "test_gce_project.py::test_down_killed_after_every_request_and_run_again": 12,
    "test_gce_project.py::test_down_after_any_partial_up_leaves_nothing": 8,
    "test_gce_project.py::test_killed_after_every_request_and_run_again": 7,
    "test_gce_project.py::test_every_request_may_go_wrong_once": 5,
    "test_gce_provision.py::test_down_in_the_middle_of_everything_leaves_nothing": 5,
    "test_gce_given_up.py::test_what_fails_every_time_is_not_paid_for_for_ever": 6,
    "test_vertex_launcher.py::test_every_request_of_a_submit_may_go_wrong_in_every_way": 10,
    "test_early_sums.py::test_they_begin_in_the_last_backward_pass_and_add_up": 20,
    "test_block_mask.py::test_logits_are_those_of_the_dense_kernels": 7,
    "test_mass_start.py::test_two_thousand_true_peers_come_at_once_while_the_process_is_busy": 9,
    "test_gke_pod_main.py::test_what_crashes_for_ever_is_counted": 7,
    "test_snapshot_random_faults.py::test_a_lost_rank_costs_no_step_and_a_lost_host_never_all_of_them": 7,
    "test_schema.py::test_random_runs_fit": 6,
    "test_page.py::test_curves_of_nonsense_are_still_json": 5,
    "test_logits.py::test_packed_logits_are_those_of_each_document_alone": 30,
    "test_step.py::test_fifty_steps_are_the_torch_trainers": 60,
    "test_step.py::test_recomputation_changes_nothing": 43,
    "test_step.py::test_bfloat16_stays_near_the_torch_trainer": 12,
    "test_step.py::test_an_update_that_is_not_finite_is_left_out_as_a_whole": 9,
    "test_step.py::test_adapters_are_trained_and_nothing_else": 9,
    "test_home_contract.py::test_3_a_prefix_once_whatever_happens_to_answers": 8,
    "test_add_a_back_end.py::test_submit_status_logs_and_down_through_a_back_end_of_another_package": 9,
    "test_submit_lost_answers.py": 70,
    "test_cache_protocol.py::test_a_host_killed_at_each_call_leaves_the_next_start_right_and_nothing_over": 6,
    "test_network_search.py::test_a_thousand_clusters_with_none_to_three_slow_hosts": 20,
}

#: For each capability at least one live test that runs in ``./setup.sh test``.
CORE = {
    "training: losses are the stored ones, whatever the layout": (
        "test_train_equivalence_live.py::test_golden_losses",
        "test_layout_cells_live.py::test_a_layout_trains_what_one_process_does[dp_shard2-tp2]",
        "test_layout_cells_live.py::test_a_layout_trains_what_one_process_does[tp2-lora]",
    ),
    "training: exact sums": ("test_train_exact_live.py::test_one_hash_at_any_world_size[plain]",),
    "training: sums over replicas that begin early": (
        "test_early_sums_live.py::test_a_replica_lost_in_the_middle_of_the_backward_pass[2-2-once-SIGKILL]",
    ),
    "training: resume bit for bit": ("test_train_resume_live.py::test_a_stop_saves_at_one_step_and_leaves_130",),
    "checkpoints: any number of ranks": ("test_checkpoint_live.py::test_four_ranks_to_any_number",),
    "checkpoints: copies in another host's memory": (
        "test_replicator_live.py::test_each_step_is_copied_to_the_peer_and_acknowledged",
    ),
    "checkpoints: memory is written out at the end": ("test_flush_live.py",),
    # A killed rank is in "own loops" and "drills", a stop in "training: resume bit for bit".
    "recovery: host": ("test_recovery_live.py::test_a_lost_host_is_replaced_by_the_spare",),
    # Nothing shared but a bucket: "GKE" has a killed pod's events on one, the contract suite both kinds of homes.
    "recovery: replicas": ("test_replicas_live.py::test_a_lost_rank_leaves_the_other_replica_alone[killed]",),
    "drills, watch": ("test_drill_live.py",),
    "strangers on every socket": ("test_strangers_live.py",),
    "verbs": ("test_verbs_live.py::test_a_detached_run_from_submit_to_down",),
    "verbs: whoever looks on may leave": ("test_terminal_live.py::test_a_pipe_that_is_full_then_closed",),
    "wrong input": ("test_wrong_input_live.py::test_truncated_safetensors",),
    "own loops": ("test_own_loop_live.py::test_kills_cost_no_step_and_no_bit",),
    "data": ("test_data_live.py::test_rivals_prepare_the_same_data_once",),
    "export": ("test_export_live.py::test_a_whole_model",),
    "ledger, report": ("test_report_page_live.py::test_it_draws_every_chart_without_an_error",),
    "watch --web": ("test_watch_page_live.py::test_the_address_leaves_the_history_and_opens_no_second_page",),
    "plan": ("test_plan_page_live.py::test_it_draws_the_chart_and_every_plan_without_an_error",),
    "simulate": ("test_rehearsal_page_live.py",),
    "Slurm": ("test_slurm_live.py::test_a_time_limit_is_continued_in_a_second_job",),
    "GKE": (
        "test_gke_control_plane_live.py::test_submit_is_one_jobset_however_often_and_whatever_is_lost",
        "test_gke_pod_live.py::test_a_verdict_is_passed_on",
        "test_gke_http_live.py",
        "test_gke_stream_live.py::test_a_line_in_the_output_out",
        "test_gke_terminal_live.py::test_the_tree_grows_in_place",
        "test_gcsfuse_live.py::test_a_new_file_is_nowhere_until_it_is_closed",
        "test_gcsfuse_run_live.py::test_the_events_of_a_killed_pod_are_lost",
    ),
    "Compute Engine: a machine starts": (
        "test_gce_machine_live.py::test_from_the_boot_to_the_agent_and_again_after_a_reboot",
    ),
    "README": (
        "test_readme.py::test_every_block_says_how_it_is_held",
        "test_readme.py::test_every_command_is_documented",
        "test_readme.py::test_every_command_line_in_the_readme_parses",
        "test_readme.py::test_links_lead_somewhere",
        "test_readme.py::test_run_files_in_the_readme_hold",
        "test_readme.py::test_extras_in_the_readme_exist",
        "test_readme.py::test_what_is_said_to_be_executed_elsewhere_is",
    ),
}

#: Tests that CI has no time for, with the test that covers the same capability there.
NIGHTLY = {
    # Four minutes and almost three on two cores, and more than three for each kind of sums.
    "test_pipeline_recovery_live.py::test_three_replicas_of_three_stages": (
        "test_pipeline_recovery_live.py::test_a_killed_stage_takes_its_replica_along_and_no_other[1f1b], "
        "and hosts in virtual time: test_grid_virtual.py"
    ),
    "test_pipeline_recovery_live.py::test_stages_that_are_hosts_go_on_as_two_hosts_of_another_layout": (
        "test_grid_virtual.py, in virtual time"
    ),
    # Three minutes on two cores.
    "test_gce_run_live.py": "test_gce_machine_live.py::test_from_the_boot_to_the_agent_and_again_after_a_reboot",
    # A minute on two cores.
    "test_tpu_live.py::test_fifty_steps_in_two_processes_are_the_torch_trainers": (
        "test_step.py::test_fifty_steps_are_the_torch_trainers, and two processes in "
        "test_tpu_live.py::test_a_run_moves_by_its_checkpoint[to torch from tensor parallel]"
    ),
    "test_watch_page_live.py::test_it_shows_what_the_terminal_shows_and_grows": (
        "test_watch_page_live.py::test_the_address_leaves_the_history_and_opens_no_second_page"
    ),
    "test_chaos_hosts_live.py::test_a_preemption_notice_swaps_the_host_before_it_goes": (
        "test_vertex_run_live.py::test_a_spot_run_is_taken_away_and_goes_on_from_its_bucket_to_its_end, "
        "test_preempted_hosts.py"
    ),
    "test_network_check_live.py::test_of_four_sound_hosts_none_is_named": (
        "test_network_check_live.py::test_a_host_behind_a_slow_link_is_named"
    ),
    "test_network_programs_live.py::test_a_host_whose_ranks_hang_is_named_with_what_they_do[stopped]": (
        "test_network_programs_live.py::test_a_host_whose_ranks_hang_is_named_with_what_they_do[code]"
    ),
    "test_network_programs_live.py::test_the_command_line": (
        "test_network_programs_live.py::test_four_collectives_between_three_hosts_and_a_fourth_that_is_not_reached"
    ),
    "test_stragglers_live.py::test_ten_percent_is_named_within_thirty_steps_five_times_of_five": (
        "test_stragglers_live.py::test_a_slow_rank_is_named"
    ),
    "test_stragglers_live.py::test_nobody_is_named_in_five_healthy_runs": (
        "test_stragglers_live.py::test_a_slow_rank_is_named"
    ),
    "test_agent_full_disk_live.py": "test_weather_live.py::test_a_full_disk_costs_saves_and_nothing_else",
    "test_memory_lost_live.py::test_a_deleted_agent_socket_keeps_no_standby_away": (
        "test_memory_lost_live.py::test_of_two_hosts_the_other_one_holds_the_copies"
    ),
    "test_memory_lost_live.py::test_one_host_goes_on_from_the_disk_and_later_from_memory_again": (
        "test_memory_lost_live.py::test_of_two_hosts_the_other_one_holds_the_copies"
    ),
    "test_init_live.py::test_the_written_file_trains[text]": (
        "test_init_live.py::test_the_written_file_trains[question and SQL]"
    ),
    "test_init_live.py::test_the_written_file_trains[chat]": (
        "test_own_chat_live.py::test_the_commands_from_own_rows_to_a_reloaded_model"
    ),
    "test_vertex_run_live.py::test_the_first_hosts_machine_dies_another_host_supervises_and_stop_saves": (
        "test_vertex_run_live.py::test_a_spot_run_is_taken_away_and_goes_on_from_its_bucket_to_its_end"
    ),
    "test_header_flip_live.py": "test_damage.py, test_snapshot_ring.py; test_snapshot_checksums_live.py has a live one",
    "test_weather_live.py::test_a_bucket_that_is_away_for_a_while": (
        "test_home_live.py::test_a_bucket_that_is_away_delays_decisions_and_stops_no_step"
    ),
    "test_simulate_live.py": (
        "test_replay_live.py::test_a_replay_agrees_with_what_happened_and_differs_from_another_seeds_run"
    ),
    "test_sweep_live.py::test_ctrl_c_saves_its_trials_the_same_words_go_on_and_limits_hold_for_all": (
        "test_sweep_live.py::test_a_killed_sweep_goes_on_and_so_does_a_trial_that_lost_its_machine"
    ),
    "test_accept_slurm_live.py::test_to_the_top_as_a_rehearsal_that_no_page_takes": (
        "test_accept_slurm_live.py::test_up_to_the_run_and_no_further_than_the_budget"
    ),
    "test_sweep_slurm_live.py": (
        "test_sweep_live.py::test_a_killed_sweep_goes_on_and_so_does_a_trial_that_lost_its_machine"
    ),
    "test_slurm_container_live.py::test_a_run_in_containers_saves_swaps_and_stops": (
        "test_slurm_container_live.py::test_ranks_see_googles_fabric_all_cores_and_the_runs_variables[pyxis]"
    ),
    "test_slurm_container_live.py::test_ranks_see_googles_fabric_all_cores_and_the_runs_variables[apptainer]": (
        "test_slurm_container_live.py::test_ranks_see_googles_fabric_all_cores_and_the_runs_variables[pyxis]"
    ),
    "test_plan_memory_live.py::test_ranks_grow_as_predicted[bf16 lora embeddings]": (
        "test_plan_memory_live.py::test_ranks_grow_as_predicted[fp32 wide tied]"
    ),
    "test_terminal_live.py::test_a_terminal_that_is_stopped_then_closed": (
        "test_terminal_live.py::test_a_pipe_that_is_full_then_closed"
    ),
    "test_damaged_log_live.py": (
        "test_damaged_records_live.py::test_a_lost_lease_and_a_flipped_bit_in_the_fence_and_in_the_run_file"
    ),
    "test_init_live.py::test_the_written_file_trains[prompt and completion]": (
        "test_init_live.py::test_the_written_file_trains[question and SQL]"
    ),
    "test_data_live.py::test_wikisql": "test_real_data_live.py::test_wikisql_is_learnt_from",
    "test_benchmarks_live.py::test_the_gpu_benchmark_trains_tiny_shapes_on_the_cpu": "the trainer's own tests",
    "test_first_gpu_hour_live.py::test_all_eighteen_commands_run": (
        "test_first_gpu_hour_live.py::test_kernels_are_compared_with_their_reference"
    ),
    "test_recovery_gpu_live.py": "test_recovery_live.py; the benchmark is started by hand",
    "test_check_gpu_live.py": "test_check_live.py; the benchmark is started by hand",
    "test_evidence_cost_live.py": "test_hang_culprits_live.py; the benchmark is started by hand",
    "test_gke_losses_live.py::test_a_node_lost_for_good_and_an_eviction_change_no_bit": (
        "test_gke_run_live.py::test_a_run_from_submit_to_its_end_with_everything_that_a_user_does"
    ),
    "test_full_disk_live.py": "test_event_writer.py, test_forgiving_outputs.py, test_serve.py",
    "test_gke_control_plane_live.py::test_row_01_the_dry_run_meets_the_webhooks": (
        "test_gke_control_plane_live.py::test_submit_is_one_jobset_however_often_and_whatever_is_lost"
    ),
    "test_revive_live.py::test_a_limit_put_on_an_agent_ends_with_it": (
        "test_limited_agent.py::test_it_ends_and_its_keeper_starts_one_with_limits_of_its_own"
    ),
    "test_revive_live.py::test_a_submit_that_takes_over_a_keeper_on_its_way_out_gets_its_host": (
        "test_local_submit_and_end.py::test_a_host_on_its_way_out_that_a_submit_has_taken_for_its_own_comes_back"
    ),
    "test_revive_live.py::test_the_only_host_comes_back[whole host]": (
        "test_revive_live.py::test_the_only_host_comes_back[keeper]"
    ),
    "test_chaos_live.py::test_a_torn_checkpoint_and_a_rotten_one_are_passed_over": "test_snapshot_checksums_live.py",
    "test_home_live.py::test_kills_on_a_folder": ("test_recovery_live.py::test_the_agent_dies_and_its_ranks_train_on"),
    "test_home_live.py::test_kills_on_a_bucket": (
        "test_home_live.py::test_a_bucket_that_is_away_delays_decisions_and_stops_no_step"
    ),
    "test_chaos_hosts_live.py::test_a_host_that_was_stopped_and_wakes_up_late_writes_nothing": (
        "test_snapshot_copies_live.py::test_a_host_that_wakes_up_too_late_cannot_write_where_its_successor_did"
    ),
    "test_chaos_hosts_live.py::test_a_host_is_lost_while_the_ranks_are_being_replaced": (
        "test_recovery_live.py::test_a_lost_host_is_replaced_by_the_spare"
    ),
    "test_chaos_hosts_live.py::test_a_one_way_partition_is_silence_too": (
        "test_recovery_live.py::test_a_cut_link_is_silence_and_the_spare_takes_over"
    ),
    "test_chaos_live.py::test_kills_at_random_moments_never_leave_half_an_update": (
        "test_recovery_live.py::test_a_killed_rank_costs_no_applied_step_and_no_bit"
    ),
    "test_chaos_live.py::test_what_goes_wrong_inside_a_step_leaves_no_trace": (
        "test_chaos_live.py::test_whatever_a_rank_does_once_is_a_restart"
    ),
    "test_snapshot_copies_live.py::test_a_lost_rank_costs_no_step_however_far_copies_lag": (
        "test_own_loop_live.py::test_a_lost_host_costs_no_step_whose_copy_was_there"
    ),
    "test_export_live.py::test_many_files_and_half_precision": "test_export_live.py::test_a_whole_model",
    "test_export_live.py::test_lora_with_tokens_that_a_chat_template_added": (
        "test_export_live.py::test_lora_merged_and_as_an_adapter"
    ),
    "test_replicator_live.py::test_a_run_loses_its_replicators_and_trains_on_and_copying_continues": (
        "test_replicator_live.py::test_a_save_outlives_its_replicator_and_a_new_replicator_takes_the_next"
    ),
    "test_own_loop_live.py::test_a_ranks_own_state_comes_back_from_memory_and_disk_and_all_ranks_take_one_checkpoint": (
        "test_own_loop_live.py::test_a_stop_saves_and_a_second_start_goes_on"
    ),
    "test_profile_live.py::test_no_bit_of_the_state_differs_though_a_rank_dies_in_its_trace": (
        "test_profile_live.py::test_traces_stacks_and_figures_of_a_run_that_trains"
    ),
    "test_plan_memory_live.py::test_ranks_grow_as_predicted[bf16 wide]": (
        "test_plan_memory_live.py::test_ranks_grow_as_predicted[fp32 wide tied]"
    ),
    "test_ports_live.py::test_a_run_needs_no_ipv4": (
        "test_ports_live.py::test_each_host_listens_on_its_own_address_alone"
    ),
    "test_ports_live.py::test_on_one_machine_everything_listens_on_loopback_and_no_process_shows_the_token": (
        "test_ports_live.py::test_each_host_listens_on_its_own_address_alone"
    ),
    "test_policy_live.py::test_a_health_verdict_leads_to_a_reset_and_only_then_to_a_swap[heals]": (
        "test_policy_live.py::test_a_health_verdict_leads_to_a_reset_and_only_then_to_a_swap[fails]"
    ),
    "test_real_data_live.py::test_a_real_model_is_tuned_on_shakespeare": (
        "test_real_data_live.py::test_wikisql_is_learnt_from"
    ),
    "test_recovery_live.py::test_a_crash_is_as_a_kill": (
        "test_recovery_live.py::test_a_killed_rank_costs_no_applied_step_and_no_bit"
    ),
    "test_recovery_live.py::test_without_a_spare_the_world_shrinks_and_grows_back": (
        "test_policy_live.py::test_a_users_policy_makes_the_batch_smaller_in_a_smaller_world, "
        "and growing on virtual hosts"
    ),
    "test_replicas_live.py::test_a_lost_rank_leaves_the_other_replica_alone[stopped]": (
        "test_replicas_live.py::test_a_lost_rank_leaves_the_other_replica_alone[killed]"
    ),
    "test_replicas_live.py::test_either_replica_can_be_the_one_that_is_lost_again_and_again": (
        "test_replicas_live.py::test_a_lost_rank_leaves_the_other_replica_alone[killed]"
    ),
    "test_replicas_live.py::test_sharded_replicas_are_kept_whole": (
        "test_replicas_live.py::test_a_lost_rank_leaves_the_other_replica_alone[killed]"
    ),
    "test_replicas_live.py::test_without_a_spare_the_living_replica_goes_on_alone_and_is_joined_again": (
        "test_replicas_live.py::test_a_lost_rank_leaves_the_other_replica_alone[killed]"
    ),
    "test_snapshot_checksums_live.py::test_two_rotten_versions_in_a_row_are_both_passed_over": (
        "test_snapshot_checksums_live.py::test_a_rotten_snapshot_is_passed_over"
    ),
    "test_takeover_state.py::test_what_a_successor_reads_is_what_its_predecessor_knew[2000]": (
        "test_takeover_state.py::test_what_a_successor_reads_is_what_its_predecessor_knew[200]"
    ),
    "test_terminal_live.py::test_nobody_reads_the_last_lines": (
        "test_terminal_live.py::test_a_pipe_that_is_full_then_closed"
    ),
    "test_train_exact_live.py::test_one_hash_at_any_world_size[lora]": (
        "test_train_exact_live.py::test_one_hash_at_any_world_size[plain]"
    ),
    "test_train_resume_live.py::test_resume_to_the_bit_after_a_kill_in_mid_save[lora-marker]": (
        "test_train_resume_live.py::test_resume_to_the_bit_after_a_kill_in_mid_save[plain-marker]"
    ),
    "test_machine_root_live.py": "test_script_runner_rows.py, test_metadata_rows.py; test_gce_machine_live.py uses it",
    "test_slices_live.py": "test_slices.py, over real sockets",
    "test_verbs_live.py::test_a_killed_supervisor_is_replaced_and_the_agents_go_on": (
        "test_recovery_live.py::test_the_supervisor_dies_and_a_new_one_takes_over"
    ),
    "test_verbs_live.py::test_train_in_a_pipe_stops_on_ctrl_c_and_goes_on_bit_for_bit": (
        "test_recovery_live.py::test_ctrl_c_saves_and_a_second_start_goes_on_bit_for_bit"
    ),
    "test_slurm_live.py::test_a_cut_link_and_then_the_supervisors_node_while_another_run_goes_on": (
        "test_slurm_live.py::test_a_time_limit_is_continued_in_a_second_job, "
        "test_recovery_live.py::test_a_cut_link_is_silence_and_the_spare_takes_over"
    ),
    "test_recovery_live.py::test_everything_is_killed_and_the_run_goes_on_from_its_checkpoint": (
        "test_recovery_live.py::test_the_supervisor_dies_and_a_new_one_takes_over, "
        "test_train_resume_live.py::test_resume_to_the_bit_after_a_kill_in_mid_save[plain-marker]"
    ),
    "test_verbs_live.py::test_sigterm_saves_and_says_75_a_second_signal_leaves_at_once": (
        "test_train_live.py::test_under_torchrun_a_sigterm_saves_and_the_next_start_goes_on"
    ),
    "test_chaos_live.py::test_the_fork_server_dies_and_takes_the_store_with_it": (
        "test_strikes_live.py::test_struck_at_random"
    ),
    "test_chaos_live.py::test_a_supervisor_that_stood_still_blames_nobody": "test_host_liveness.py, in virtual time",
    "test_second_user_live.py::test_a_run_goes_on_and_down_beside_a_folder_that_took_its_memorys_name": (
        "test_memory_dir.py::test_a_new_folder_is_its_owners_alone_and_its_name_cannot_be_guessed"
    ),
    "test_weather_live.py::test_clocks_that_are_stepped_by_an_hour_are_nobodys_incident": (
        "test_stepped_lease.py, test_stepped_clock.py"
    ),
    "test_plan_memory_live.py::test_the_trace_agrees_with_the_closed_form": (
        "test_plan_memory_live.py::test_ranks_grow_as_predicted[fp32 wide tied]"
    ),
    "test_ledger_live.py::test_the_identity_closes_and_everything_has_a_name": (
        "test_identity.py, test_report_page_live.py::test_it_draws_every_chart_without_an_error"
    ),
    "test_weather_live.py::test_a_disk_that_fails_and_then_is_slow": (
        "test_weather_live.py::test_a_full_disk_costs_saves_and_nothing_else"
    ),
}


def names(item: pytest.Item) -> set[str]:
    file, function = item.path.name, getattr(item, "originalname", item.name)
    return {file, f"{file}::{function}", f"{file}::{item.name}"}


def mark(items: list[pytest.Item]) -> None:
    core = {test for tests in CORE.values() for test in tests}
    for item in items:
        mine = names(item)
        for marker, tests in (("slow", SLOW), ("core", core), ("soak", NIGHTLY)):
            if mine.intersection(tests):
                item.add_marker(marker)


if __name__ == "__main__":  # what `./setup.sh test` has left out of SLOW, as arguments of pytest
    paths = {path.name: path for path in pathlib.Path(__file__).parent.rglob("test_*.py")}
    print(*(f"{paths[file]}{sign}{rest}" for file, sign, rest in (test.partition("::") for test in SLOW)), sep="\n")
