"""Tests that `make test` leaves to `make test-all`, and what still proves each claim in `make test`.

Cells of a matrix are marked in their files (tests/cells.py). This table holds whole tests whose
cost is process start or real training. A key is a folder, or `file::function[cell]`; the last two
may be left out, and are regular expressions.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

COLLECTED: list[pytest.Item] = []  # what this session has collected, wide or not
WIDE = {
    "fuzz/test_fuzz.py::test_thirty_seconds_find_nothing": (
        "security/: damaged files of each kind, one by one; make fuzz"
    ),
    "model/test_towers.py::test_divided_it_is_the_same": "test_towers.py on one rank; same/test_layouts.py",
    "faults/test_tasks.py::test_killed_and_resumed": (
        "faults/test_kill.py: a killed rank of two; the cell kto of losses/test_resume.py; kto on zero3 in the same file"
    ),
    "losses/test_resume.py::test_every_loss_resumes_to_the_same_bits"
    "[simpo|sigmoid_norm|ipo|soft labels|sft|reward]": (
        "its cells with state or another kind of batch: sigmoid, aot, kto, bco, weighted, sigmoid and sft"
    ),
    "health/test_health.py::test_a_finding_appears_on_the_run_made_for_it[answers_longer|chosen_falling]": (
        "its other cells; test_findings_follow_from_the_metrics_alone"
    ),
    "data/test_hub.py::test_a_model_of_the_cache_is_used_if_the_hub_never_answers": (
        "test_a_hub_that_never_answers_is_asked_once and what is read without a network, in the same file"
    ),
    "cluster/test_orphans.py": (
        "cluster/test_supervision.py: the process of a device ends with the driver; "
        "cluster/test_starts.py: a local Ray"
    ),
    "cluster/test_hang.py::test_under_torchrun_one_watchdog_names_it_and_all_processes_end": (
        "one process with its stacks, in the same file; cluster/test_deadlines.py under torchrun"
    ),
    "data/test_data_page.py::test_the_page_in_a_browser": "page/test_page.py, in a browser",
    "docs/test_snippets.py::test_commands_run": (
        "the README's, in the same file; every YAML and Python block"
    ),
    "report/test_report.py::test_in_a_browser": "page/test_page.py in a browser; the report's figures here",
    "same/test_adapters.py::test_roles_share_one_model_and_leave_one_adapter": "adapters/test_run.py",
    "same/test_stages.py::test_a_divided_backward_pass_adds_up_in_float32": "test_layouts.py: schedules",
    "sweep/test_sweep.py::test_a_signal_is_passed_on_to_the_children": "train/test_signals.py",
    "sweep/test_sweep.py::test_the_children_of_a_killed_sweep_are_asked_to_end": "test_signals.py",
    "tracking/test_trackers.py::test_wandb_offline": "api/test_coati.py; tracking/test_run.py: TensorBoard",
    "tracking/test_trackers.py::test_(trackio|mlflow).*": "records, ids and extras, by function, in the same file",
    "tracking/test_trackers.py::test_no_secret_reaches_a_tracker": "security/test_secrets.py: all files of a run",
    "tracking/test_trackers.py::test_wandb_without_a_server_is_kept_in_local_files": "api/test_coati.py",
    "train/test_pack.py::test_bins_of_real_pairs_are_nearly_full": "bins of drawn lengths, in the same file",
    "train/test_signals.py::test_a_signal_before_loading_keeps_the_prepared_data": (
        "test_a_signal_ends_in_a_checkpoint"
    ),
    "train/test_signals.py::test_a_save_requested_before_training_follows_the_first_step": (
        "checkpoint/test_control.py"
    ),
    "api/test_resume.py::test_a_killed_training_resumes_to_the_same_bits[fit-loader-adamw]": (
        "its cell fit-rows; coati-loader: an optimizer of torch"
    ),
    "board/test_page.py::test_both_themes_and_widths": "page/test_page.py: both themes; the board's tests here",
    "board/test_page.py::test_new_lines_appear": "board/test_serve.py: new lines of a run",
    "board/test_page.py::test_the_keyboard_is_enough": "test_pairs_token_by_token",
    "board/test_page.py::test_the_report_opens_and_cannot_ask_the_board": "test_serve.py: origin",
    "board/test_page.py::test_a_run_without_weights_says_so": "board/test_inspector.py",
    "cluster/test_hang.py::test_on_ray_it_is_named_and_all_processes_end": (
        "cluster/test_deadlines.py: every call of a rank ends by its deadline; who is blamed, by function, "
        "and one process with its stacks, in the same file"
    ),
    "cluster/test_hang.py::test_neither_a_breakpoint_nor_a_process_that_was_stopped_is_a_hang": (
        "the watchdog's rules, by function, in the same file"
    ),
    "cluster/test_seed.py::test_seed_000_the_two_clusters": "cluster/test_cluster.py: two roles on Ray",
    "cluster/test_supervision.py::"
    "test_after_a_lost_rank_the_job_restarts_and_the_result_has_the_same_bits": (
        "test_a_run_with_lost_workers_ends_as_one_without, with a process that stands in for ranks"
    ),
    "config/test_roll.py::test_dense_files_run[older]": "its cell dense",
    "data/test_real.py": "data/test_tokens.py, on tokenizers made by the tests",
    "health/test_health.py::test_findings_follow_from_the_metrics_alone[(?!steps).*]": "its first cell",
    "page/test_page.py::test_the_theme_is_kept_and_colours_the_charts": "test_in_a_browser",
    "train/test_outcome.py": "train/test_trainer.py and demo/test_demo.py train and judge a model",
    "docs/test_newcomer.py": "docs/test_snippets.py runs the README's commands in their order",
    "api/test_script.py": "api/test_coati.py runs the same trainer in this process",
    "bench/": "measures, not promises: what they measure is tested in the rooms of the package",
    "engines/": "nothing in make test; config/test_strategies.py: names of strategies",
    "release/test_container.py": "release/test_habits.py; make release",
    "release/test_install.py": "house/test_packaging.py: versions and pins; make release",
    "release/test_release.py": "house/test_packaging.py: versions and pins; make release",
    "adapters/test_run.py::test_killed_and_resumed_to_the_bit[lora]": "its cell pissa",
    "adapters/test_run.py::test_the_cache_distinguishes_adapters": "reference/test_cache.py: keys",
    "board/test_page.py::test_a_browser_enters_by_the_private_page": "board/test_serve.py: token",
    "checkpoint/test_disk_space.py::test_a_whole_run_whose_disk_is_full_for_a_while": (
        "checkpoint/test_disk_space.py: missed saves one by one, and a real full disk"
    ),
    "checkpoint/test_unreachable.py::test_training_continues_without_its_copies[13|116]": "cell 5",
    "cluster/test_adapters.py": "same/test_adapters.py: adapters on ranks without Ray",
    "cluster/test_cluster.py::test_a_reference_that_moves_is_asked_after_each_move": (
        "losses/test_resume.py: TR-DPO in one process; same/test_before_after.py (wide)"
    ),
    "cluster/test_cluster.py::test_equal_mappings_share_processes_and_others_do_not": (
        "cluster/test_cluster.py: roles on two devices"
    ),
    "cluster/test_cluster.py::test_warnings_of_all_ranks_are_logged_once_with_their_ranks": (
        "cluster/test_supervision.py: warnings of other ranks are logged once"
    ),
    "cluster/test_memory.py": "train/test_shortage.py: the same retry in one process",
    "cluster/test_nonfinite.py": "train/test_nonfinite.py: all ranks skip together",
    "cluster/test_seed.py::test_seed_000_the_pipeline_makes_its_clusters": "the seed's script, same file",
    "cluster/test_signals.py": (
        "train/test_signals.py in one process; cluster/test_one_program.py: a signal reaches every rank"
    ),
    "cluster/test_torchrun.py": (
        "cluster/test_one_program.py: torchrun's variables; faults/test_kill.py: two ranks, one killed; "
        "cluster/test_supervision.py: the first cause"
    ),
    "data/test_prepare.py::test_a_damaged_cache_is_built_again[report|gone|emptied|truncated]": (
        "its cell `a bit`"
    ),
    "data/test_prepare.py::test_a_run_over_a_flipped_bit_has_the_same_losses": (
        "the damaged cache in the same file"
    ),
    "faults/test_damage.py": "checkpoint/test_damage.py in one process",
    "faults/test_elastic.py": "same/test_elastic.py: any layout resumes under any other",
    "faults/test_full_disk.py": "checkpoint/test_disk_space.py",
    "faults/test_soak.py::test_random_faults_end_as_no_fault": (
        "faults/test_kill.py: one kill after another at chosen points; make soak"
    ),
    r"health/test_health.py::test_a_healthy_run_has_no_finding[(?!sigmoid\]).*]": "its cell sigmoid",
    "health/test_health.py::test_a_finding_appears_on_the_run_made_for_it[overfitting"
    "|margin_saturated|accuracy_stuck|length_exploitation|data/.*]": "the other findings",
    "reference/test_cache.py::test_two_runs_fill_it_at_the_same_time": (
        "reference/test_logprob_cache.py: segments of several writers"
    ),
    "reference/test_cache.py::test_a_loss_that_reads_tokens": "test_tokens_on_request",
    "reference/test_cache.py::test_partly_filled_by_a_shorter_run": "test_two_epochs_do_one_forward",
    "reference/test_cache.py::test_every_loss_seed_and_batch_shares_it": "test_another_beta",
    "reference/test_resume.py::test_cached_values_can_be_distinguished_from_others": (
        "the other tests of reference/test_resume.py"
    ),
    "reference/test_resume.py::test_killed_.*[(6|7)]": "the other cells",
    "security/test_secrets.py::test_the_console_shows_none_when_a_run_crashes": (
        "a failing run writes none, in the same file"
    ),
    "sweep/test_sweep.py::test_finished_runs_on_other_pairs_are_refused": (
        "checkpoint/test_identity.py: other data is refused"
    ),
    "train/test_start_from_checkpoint.py": "train/test_resume.py",
    "adapters/test_run.py::test_from_the_base_to_the_merged_model[some|rslora|gaussian|pissa-rslora]": (
        "the cells lora, dora, pissa, modules and bf16"
    ),
    "adapters/test_run.py::test_what_a_run_left_is_trained_on[dora|modules]": "its cell pissa-rslora",
    "api/test_ranks.py::test_coati_on_two_ranks[zero2|gemini]": "its cell ddp; zero3 in the same file",
    "checkpoint/test_damage.py::test_damaged_entries_of_the_cache_are_computed_again"
    "[truncate|edit|other_version|unlink|swap]": (
        "the cell flip_bit; reference/test_logprob_cache.py: any flipped bit, any cut"
    ),
    "cluster/test_ray_security.py::test_secrets_of_a_worker_are_in_no_log_and_no_argument": (
        "security/test_secrets.py: all files of a run; Ray's ports, token and files in the same file"
    ),
    "data/test_hub.py::test_the_command_asks_the_hub_for_nothing_else": (
        "the requests of runs, counted in the same file"
    ),
    "faults/test_tasks.py::test_adapters": (
        "train/test_tasks.py: a reward model with an adapter; same/test_adapters.py: the layouts"
    ),
    "health/test_health.py::test_a_finding_appears_on_the_run_made_for_it[answers_repeat"
    "|answers_do_not_end]": "the other findings; each rule on written metrics, in the same file",
    "house/test_adding.py::test_a_loss_and_a_format_by_files_in_the_package": (
        "test_files_in_the_package_are_known; training with a loss and a format of one's own by --import"
    ),
    "losses/test_resume.py::test_every_loss_resumes_to_the_same_bits[(?!(sigmoid.*|ipo|aot|sft|simpo"
    r"|weighted|soft labels|kto|bco|reward)\]).*]": "losses have no state: one of each kind, and all with one",
    "same/test_tasks.py::test_kto_does_not_depend_on_the_number_of_ranks[(1-dtype0|4-dtype1).*]": (
        "the other two cells"
    ),
    "train/test_nonfinite.py::test_all_ranks_skip_together[dp2-forward|dp2 zero3-forward|tp2-backward]": (
        "a backward pass on dp2 and zero3, a forward pass on pp2"
    ),
    "train/test_resume.py::test_a_signal_ends_in_a_complete_checkpoint[2-130]": "its cell SIGTERM",
    "train/test_signals.py::test_a_signal_ends_in_a_checkpoint[last evaluation-15|reference-15"
    "|last save-15|evaluation-2]": "the other phases; SIGINT while training",
    "train/test_signals.py::test_a_second_signal_quits_immediately[15-15|2-2]": "15-2 and 2-15",
    "same/test_experts.py::test_half_precision": (
        "same/test_layouts.py: ep with every axis; same/test_rounding.py: bfloat16 in every layout"
    ),
    "same/test_stages.py::test_log_probs_follow_the_weights": (
        "same/test_layouts.py: schedules; same/test_shard.py: log-probs of all ranks follow a step"
    ),
    "train/test_vision_run.py::test_a_full_cache_computes_the_rest": (
        "hits in the second epoch, in the same file"
    ),
    "train/test_tasks.py::test_an_exported_reward_model_gives_the_scores_of_the_run[changes0]": (
        "its cell changes1"
    ),
    "train/test_tasks.py::test_eval_prints_what_training_logged_last[changes0]": "its cell bco",
    "board/test_page.py::test_curves_comparison_filter_and_findings": (
        "board/test_serve.py: what the page draws; page/test_page.py: charts in a browser; "
        "test_pairs_token_by_token, in the same file"
    ),
    "board/test_page.py::test_a_damaged_folder_and_a_diverged_model_are_shown": (
        "board/test_serve.py: damaged folders, and numbers that are not finite"
    ),
    "sweep/test_sweep.py::test_three_betas_take_one_pass_of_the_reference": (
        "runs side by side share one pass, same file; reference/test_cache.py: another beta"
    ),
    "plan/test_experts.py::test_plan_prints_the_memory_of_a_rank": (
        "active weights and what each rank holds, in the same file; plan/test_run.py: what is printed"
    ),
    "plan/test_run.py::test_plan_times_this_machine_without_data": (
        "test_plan_forecasts_on_this_machine: timed with data"
    ),
    "health/test_tuned.py": (
        "pairs/test_tune.py: choice, finalists, limits and a damaged state, by function and on "
        "stored runs"
    ),
    "commands/test_mlx.py": (
        "commands/test_servers.py: a server that adds a BOS and returns ids by log-probs, and others"
    ),
    "commands/test_score.py::test_real_pairs_score_as_in_a_padded_forward": (
        "test_a_run_scores_as_it_evaluated; board/test_inspector.py: a padded computation"
    ),
    "data/test_findings.py::test_real_pairs": "each finding on pairs made for it, in the same file",
    "train/test_hybrid_runs.py::test_a_resumed_run_ends_in_the_same_bits": (
        "train/test_resume.py; same/test_hybrids.py: files of one are read by ranks"
    ),
    "train/test_rounding.py::test_a_moving_reference_resumes_with_its_low_bits": (
        "same/test_rounding.py: a reference in bfloat16 moves; losses/test_resume.py: TR-DPO"
    ),
    "faults/test_kill.py::test_one_of_two_ranks[.*follow.*]": "its cell backward",
    "faults/test_commands.py": (
        "train/test_learned_nothing.py: a kill leaves no half report; model/test_export.py: nor an export"
    ),
    "rounds/test_rounds.py::test_killed_in_every_stage_the_same_command_ends_in_the_same_files": (
        "what each stage leaves and reads, in the same file; kills only in make test-wide"
    ),
    "same/test_load.py::test_no_process_holds_more_than_two_shards": (
        "what each rank reads, in the same file; the peak only in make test-wide"
    ),
    "same/test_adapters.py::test_frozen_shards_stay_in_the_precision_they_are_computed_in": (
        "its layouts, in the same file; same/test_rounding.py: precisions in every layout"
    ),
    "model/test_released_names.py::test_a_trained_model_has_the_names_of_its_source_and_opens"
    "[mistral_large4-saved]": "its cell qwen3_5_moe",
    "health/test_answers_at_end.py::test_the_loss_on_texts_is_that_of_one_process": (
        "health/test_answers.py: answers at evaluations; same/test_shard.py: log-probs of all ranks"
    ),
    "security/test_strangers.py::test_nothing_of_a_stranger_runs_or_writes_outside[sweep|plan|tune]": (
        "its other cells: train, score, data and more read the same config by the same loader"
    ),
    "trl/test_numbers.py::test_log_history_is_trls[orpo]": "its other cells; golden/test_trl.py: ORPO",
}


@cache
def _patterns() -> list[re.Pattern[str]]:
    return [_pattern(key) for key in WIDE]


def _pattern(key: str) -> re.Pattern[str]:
    if key.endswith("/"):
        return re.compile(f"tests/{re.escape(key)}")
    file, _, rest = key.partition("::")
    function, _, cell = rest.partition("[")
    named = f"::{function or '[^[]*'}"
    return re.compile(
        rf"tests/{re.escape(file)}{named}" + (rf"\[(?:{cell[:-1]})\]$" if cell else r"(?:\[|$)")
    )


def is_wide(test: str) -> bool:
    """Return whether a test id is in the table."""
    return any(pattern.match(test) for pattern in _patterns())
