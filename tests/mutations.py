"""One-line mutations of the engine, each with the fast tests that catch it.

`python -m tests.mutations [numbers]` applies one mutation after another to a copy of the package
and runs the named tests on it. It ends with status 1 if a mutation survives.
tests/house/test_mutations.py keeps the table up to date.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("rather", "tests", "pyproject.toml")
TESTS_FAILED = 1  # pytest's exit status; all others mean that the tests did not run
PATIENCE = 900  # seconds for the tests of one mutation; a mutation that makes ranks wait is caught


class Mutation(NamedTuple):
    """One changed line: `before` occurs exactly once in `file`."""

    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "losses: DPO's margin has the wrong sign",
        "rather/losses/losses.py",
        "return smoothed(beta * gap(ratios) - gamma, chance_wrong(x, label_smoothing))",
        "return smoothed(-beta * gap(ratios) - gamma, chance_wrong(x, label_smoothing))",
        ("tests/losses/test_losses.py::test_the_formula",),
    ),
    Mutation(
        "losses: IPO ignores the 2 in 1 / (2 beta)",
        "rather/losses/losses.py",
        "return (gap(ratios) - 1 / (2 * beta)) ** 2",
        "return (gap(ratios) - 1 / beta) ** 2",
        ("tests/losses/test_losses.py::test_the_formula",),
    ),
    Mutation(
        "objective: the weights of a list of losses are ignored",
        "rather/losses/objective.py",
        "sum(term.weight * self.of(term, x) for term in self.terms)",
        "sum(self.of(term, x) for term in self.terms)",
        ("tests/losses/test_losses.py::test_a_weighted_list_is_the_weighted_sum",),
    ),
    Mutation(
        "metrics: sums ignore the pairs' weights",
        "rather/losses/metrics.py",
        "return dict(zip(columns, torch.stack(list(columns.values())) @ weight_P, strict=True))",
        "return dict(zip(columns, torch.stack(list(columns.values())).sum(1), strict=True))",
        ("tests/train/test_metrics.py::test_each_metric_is_a_weighted_mean_over_pairs",),
    ),
    Mutation(
        "pack: a response that branches off starts at position 0",
        "rather/data/pack.py",
        "[self.count[len(path) - len(ids) : len(path)] for ids, path in self.segments]",
        "[self.count[: len(ids)] for ids, path in self.segments]",
        ("tests/train/test_pack.py::test_every_index_by_hand",),
    ),
    Mutation(
        "pack: the first token of a branch is predicted by its neighbour in the layout",
        "rather/data/pack.py",
        "path[-len(ids) - 1] if len(path) > len(ids) else -1",
        "path[-len(ids)] - 1 if len(path) > len(ids) else -1",
        ("tests/train/test_pack.py::test_every_index_by_hand",),
    ),
    Mutation(
        "sampler: every epoch has the same order",
        "rather/data/sampler.py",
        "random = np.random.Generator(np.random.PCG64([self.seed, epoch]))",
        "random = np.random.Generator(np.random.PCG64([self.seed, 0]))",
        ("tests/train/test_sampler.py::test_epochs_and_seeds_differ",),
    ),
    Mutation(
        "schedule: the warm-up is one update ahead",
        "rather/optim/optimizer.py",
        "return peak * updates / warmup",
        "return peak * (updates + 1) / warmup",
        ("tests/train/test_optim.py::test_rates_by_hand",),
    ),
    Mutation(
        "clipping: a gradient below the limit is scaled up to it",
        "rather/optim/optimizer.py",
        "clip = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm > 0",
        "clip = self.max_grad_norm / (grad_norm + 1e-6) if self.max_grad_norm > 0",
        ("tests/train/test_optim.py::test_float32_is_torch_adamw",),
    ),
    Mutation(
        "adamw: the bias correction of split masters never advances",
        "rather/optim/adamw.py",
        "steps = torch.tensor([float(state.steps) for state in states])",
        "steps = torch.tensor([0.0 for _ in states])",
        ("tests/train/test_optim.py::test_split_masters_have_the_bits_of_float32_training",),
    ),
    Mutation(
        "adamw: masters lose their lower 16 bits",
        "rather/optim/adamw.py",
        "low.copy_(low_bits(master))",
        "low.zero_()",
        ("tests/train/test_optim.py::test_split_masters_have_the_bits_of_float32_training",),
    ),
    Mutation(
        "rounding: the thresholds of a shard ignore its offset",
        "rather/optim/rounding.py",
        "index += offset",
        "index += 0",
        ("tests/optim/test_rounding.py::test_blocks_of_a_tensor_have_the_thresholds_of_the_whole",),
    ),
    Mutation(
        "rounding: the second word of the hash has the first key",
        "rather/optim/rounding.py",
        "bits.add_(signed(second_key))",
        "bits.add_(signed(first_key))",
        ("tests/optim/test_rounding.py::test_written_vectors",),
    ),
    Mutation(
        "rounding: a master forgets the carry",
        "rather/optim/rounding.py",
        "upper = weight.detach().bfloat16().view(torch.int16).int() - carry",
        "upper = weight.detach().bfloat16().view(torch.int16).int()",
        ("tests/optim/test_rounding.py::test_the_master_is_recovered_from_weight_and_low_bits",),
    ),
    Mutation(
        "rounding: float32 shards are not rounded",
        "rather/optim/rounding.py",
        "return weight.dtype == torch.bfloat16 or name in self.held",
        "return weight.dtype == torch.bfloat16",
        ("tests/same/test_rounding.py::test_every_layout_computes_with_the_weights_of_the_file",),
    ),
    Mutation(
        "export: weights are rounded to nearest",
        "rather/model/export.py",
        "cast = self.rounding.cast(name, value, self.dtype, spec)",
        "cast = value.to(self.dtype)",
        ("tests/train/test_rounding.py::test_every_file_holds_the_weights_of_the_last_forward_pass",),
    ),
    Mutation(
        "train step: the loss is not divided by the step's weight",
        "rather/train/rank_trainer.py",
        "return scored.losses @ batch.weight_P / total * scale",
        "return scored.losses @ batch.weight_P * scale",
        ("tests/train/test_trainer.py::test_a_step_is_the_plain_padded_computation",),
    ),
    Mutation(
        "train step: an infinite gradient is applied",
        "rather/train/rank_trainer.py",
        "if not math.isfinite(result.grad_norm):",
        "if math.isnan(result.grad_norm):",
        ("tests/train/test_nonfinite.py::test_an_infinite_gradient_is_skipped",),
    ),
    Mutation(
        "resume: the fp16 loss scale starts again (B11)",
        "rather/train/rank_trainer.py",
        'if (scale := self._trained.loss_scale) and "loss_scale" in numbers:',
        'if (scale := self._trained.loss_scale) and "scale" in numbers:',
        (
            "tests/train/test_trainer.py::test_the_state_is_all_that_later_steps_depend_on",
            "tests/train/test_pipeline.py::test_the_loss_scale_of_float16_is_restored_at_resume",
        ),
    ),
    Mutation(
        "TR-DPO: a reference in bfloat16 loses its low bits",
        "rather/train/rank_trainer.py",
        "if self.policy.rounding.applies(name, shard):",
        "if False:",
        ("tests/same/test_rounding.py::test_a_reference_in_bfloat16_moves_by_less_than_a_step_of_bfloat16",),
    ),
    Mutation(
        "TR-DPO: the low bits of a reference are not added to its weights",
        "rather/train/rank_trainer.py",
        "before = self._weight(name, parameter).to(shard.device)",
        "before = shard",
        ("tests/same/test_rounding.py::test_a_reference_in_bfloat16_moves_by_less_than_a_step_of_bfloat16",),
    ),
    Mutation(
        "linear layers: sharded weights of a group of one rank are joined",
        "rather/train/rank_trainer.py",
        "is_whole = self._is_alone and not self.mesh.sums_gradients",
        "is_whole = self._is_alone",
        ("tests/same/test_shard.py::test_a_frozen_model_in_a_group_of_one_gpu",),
    ),
    Mutation(
        "linear layers: what autograd gives besides the total of a layer is ignored",
        "rather/optim/adamw.py",
        "            total.add_(self.sum)\n",
        "",
        ("tests/optim/test_summing.py::test_a_weight_that_is_used_twice_gets_its_whole_gradient",),
    ),
    Mutation(
        "reward: scores are computed in bfloat16",
        "rather/model/policy.py",
        "            rows_UD = hidden_ND.index_select(0, batch.rows_U).float()\n"
        "            scores_U = rows_UD @ head.weight[0].float()\n",
        "            rows_UD = hidden_ND.index_select(0, batch.rows_U)\n"
        "            scores_U = rows_UD @ head.weight[0]\n",
        ("tests/model/test_reward.py::test_scores_of_a_model_in_bfloat16_are_computed_in_float32",),
    ),
    Mutation(
        "reward: an end token such as <|endoftext|> becomes the padding",
        "rather/model/reward.py",
        'ends = {tokenizer.eos_token, *(token for token in tokens if token and "end" in token)}',
        "ends = {tokenizer.eos_token}",
        ("tests/model/test_reward.py::test_a_token_that_ends_texts_is_not_the_padding_of_a_reward_model",),
    ),
    Mutation(
        "router loss: recomputed layers count the tokens of another micro-batch",
        "rather/model/policy.py",
        "if mask_N is not None and states.requires_grad:",
        "if False:",
        ("tests/model/test_experts.py::test_recomputed_layers_count_the_tokens_of_their_own_micro_batch",),
    ),
    Mutation(
        "router loss: the loss scale of float16 is left out",
        "rather/parallel/routers.py",
        "slope = scale * self.coefficient * len(choices) * choices / rows.square()",
        "slope = self.coefficient * len(choices) * choices / rows.square()",
        ("tests/model/test_experts.py::test_the_router_loss_is_multiplied_by_the_loss_scale",),
    ),
    Mutation(
        "attention: values that are narrower than keys are not padded for a kernel",
        "rather/model/attention.py",
        "return F.pad(x, (0, missing)) if missing else x",
        "return x",
        ("tests/model/test_attention.py::test_the_path_of_a_gpu_takes_values_of_another_width_than_keys",),
    ),
    Mutation(
        "head: the last rows of a chunk are dropped",
        "rather/model/head.py",
        "return (slice(first, min(first + size, rows)) for first in range(0, rows, max(1, size)))",
        "return (slice(first, first + size) for first in range(0, rows - 1, max(1, size)))",
        ("tests/model/test_head.py::test_equals_log_softmax",),
    ),
    Mutation(
        "head: the gradient ignores the soft-cap's slope",
        "rather/model/head.py",
        "slope = 1 - (logits / self.softcap) ** 2  # tanh' at the capped logit",
        "slope = 1 - (0 * logits / self.softcap) ** 2  # tanh' at the capped logit",
        ("tests/model/test_head.py::test_gradcheck",),
    ),
    Mutation(
        "attention: a segment with more keys than queries is causal from the top left",
        "rather/model/attention.py",
        "behind = torch.arange(keys - queries, keys, device=q.device)[:, None]",
        "behind = torch.arange(queries, device=q.device)[:, None]",
        ("tests/model/test_attention.py::test_equals_the_definition",),
    ),
    Mutation(
        "sharding: gradients are averaged over ranks instead of summed",
        "rather/parallel/shard.py",
        "unit.set_gradient_divide_factor(1.0)",
        "unit.set_gradient_divide_factor(2.0)",
        ("tests/same/test_shard.py::test_half_precision_keeps_exact_shards",),
    ),
    Mutation(
        "sharding: bf16 is not what shards are computed in (B12)",
        "rather/parallel/shard.py",
        "param_dtype=compute if narrow else None,",
        "param_dtype=None,",
        ("tests/same/test_shard.py::test_half_precision_keeps_exact_shards",),
    ),
    Mutation(
        "sharding: weights gathered without gradients stay gathered (B11)",
        "rather/train/rank_trainer.py",
        "        settle(self.policy)\n",
        "",
        ("tests/same/test_shard.py::test_a_moving_reference_keeps_no_gathered_weights",),
    ),
    Mutation(
        "sharding: gathered weights outlive an update (B12)",
        "rather/parallel/shard.py",
        "policy.set_reshard_after_backward(last)",
        "policy.set_reshard_after_backward(False)",
        ("tests/same/test_shard.py::test_log_probs_of_all_ranks_follow_a_step",),
    ),
    Mutation(
        "tensor parallel: the gradient that enters a region is one rank's part of the sum",
        "rather/model/collectives.py",
        "return _Collective.apply(x, _same, _sum, 0, group)",
        "return _Collective.apply(x, _same, _same, 0, group)",
        ("tests/same/test_layouts.py::test_the_run_is_that_of_one_process[tp2-sigmoid]",),
    ),
    Mutation(
        "tensor parallel: replicated weights keep one rank's part of their gradient",
        "rather/train/rank_trainer.py",
        'if partial_gradients and (group := self.mesh.group("tp")):',
        'if not partial_gradients and (group := self.mesh.group("tp")):',
        ("tests/same/test_layouts.py::test_the_run_is_that_of_one_process[tp2 sequence-sigmoid]",),
    ),
    Mutation(
        "context parallel: a cut segment sees keys after its own end",
        "rather/parallel/context.py",
        "yield high - low, k_start, k_start + k - q + high - q_start",
        "yield high - low, k_start, k_start + k",
        ("tests/same/test_context.py::test_shares_make_up_the_whole",),
    ),
    Mutation(
        "pipeline stages: a tied embedding keeps the gradient of one end",
        "rather/parallel/stages.py",
        "gradient.add_(received)",
        "gradient.add_(received * 0)",
        ("tests/same/test_layouts.py::test_the_run_is_that_of_one_process[pp2-sigmoid]",),
    ),
    Mutation(
        "checkpoint: files are not synced before they are named",
        "rather/checkpoint/checkpoint.py",
        "os.fsync(file.fileno())",
        "file.fileno()",
        ("tests/checkpoint/test_checkpoint.py::test_everything_is_synced_before_latest_names_it",),
    ),
    Mutation(
        "checkpoint: the digest of a file is not compared",
        "rather/checkpoint/manifest.py",
        "if digest != files[name][1]:",
        "if digest != digest:",
        ("tests/checkpoint/test_damage.py::test_a_damaged_checkpoint_is_named_and_an_older_one_used",),
    ),
    Mutation(
        "checkpoint: later checkpoints come before the one in LATEST",
        "rather/checkpoint/checkpoint.py",
        "return sorted(checkpoints, key=lambda path: _step(path) > latest_step)",
        "return sorted(checkpoints, key=lambda path: _step(path) < latest_step)",
        ("tests/checkpoint/test_checkpoint.py::test_latest_decides_what_is_newest",),
    ),
    Mutation(
        "log-prob cache: the checksum of a block is not compared",
        "rather/reference/logprob_cache.py",
        "is_whole = len(payload) == size and zlib.crc32(payload) == payload_sum",
        "is_whole = len(payload) == size",
        ("tests/reference/test_logprob_cache.py::test_any_flipped_bit_costs_its_own_block_and_is_never_used",),
    ),
    Mutation(
        "identity: a field that an old checkpoint lacks counts as a change",
        "rather/pipeline/checks.py",
        "if field not in then or field not in now:",
        "if field not in then and field not in now:",
        ("tests/checkpoint/test_identity.py::test_what_an_old_checkpoint_does_not_know_is_taken_as_unchanged",),
    ),
    Mutation(
        "rollback: the step that caused it is not skipped",
        "rather/pipeline/loop.py",
        "parts.state.progress.rollbacks = [*rollbacks, [newest.step, step]]",
        "parts.state.progress.rollbacks = rollbacks",
        ("tests/train/test_nonfinite.py::test_a_rollback_leaves_the_step_out",),
    ),
    Mutation(
        "signals: a stop that another process received is not agreed on",
        "rather/run_folder/control.py",
        "self.stops, self.saves = asked >= STOPS, asked > 0",
        "self.stops, self.saves = asked > STOPS + 64, asked > 0",
        ("tests/train/test_signals.py::test_a_signal_between_two_agreements_waits_for_the_next",),
    ),
    Mutation(
        "metrics: the mean of sft_loss is over undesirable answers",
        "rather/losses/metrics.py",
        '"sft_loss": "chosen",',
        '"sft_loss": "rejected",',
        ("tests/train/test_metrics.py::test_means_of_single_answers_are_over_the_answers_of_their_label",),
    ),
    Mutation(
        "bco: the running mean also takes skipped steps",
        "rather/pipeline/loop.py",
        "if not result.skipped:\n            progress.running = running",
        "if True:\n            progress.running = running",
        ("tests/train/test_nonfinite.py::test_a_skipped_step_does_not_enter_the_running_mean",),
    ),
    Mutation(
        "bco: evaluations compare with 0",
        "rather/pipeline/hooks.py",
        "self.evaluation.running = progress.running",
        "self.evaluation.running = [0, 0.0]",
        ("tests/train/test_tasks.py::test_eval_prints_what_training_logged_last",),
    ),
    Mutation(
        "guard: a step without weight breaks a row of steps with NaN",
        "rather/pipeline/guard.py",
        'if result.skip_reason not in ("overflow", "no_weight"):',
        'if result.skip_reason != "overflow":',
        ("tests/train/test_nonfinite.py::test_only_a_step_that_was_computed_breaks_a_row",),
    ),
    Mutation(
        "loop: only the process that was asked for a checkpoint saves",
        "rather/pipeline/hooks.py",
        "is_requested = step > 0 and self.requests.stop.saves",
        "is_requested = step > 0 and self.requests.stop.save_now",
        ("tests/train/test_signals.py::test_a_save_that_another_process_was_asked_for_is_made_by_all",),
    ),
    Mutation(
        "loop: a checkpoint before the first step",
        "rather/pipeline/hooks.py",
        "is_requested = step > 0 and self.requests.stop.saves",
        "is_requested = self.requests.stop.saves",
        ("tests/train/test_signals.py::test_a_save_that_another_process_was_asked_for_is_made_by_all",),
    ),
    Mutation(
        "object store: files are deleted before their manifest",
        "rather/checkpoint/store.py",
        'key=lambda name: not name.endswith(f"/{MANIFEST}")',
        'key=lambda name: name.endswith(f"/{MANIFEST}")',
        ("tests/checkpoint/test_store.py::test_a_manifest_is_deleted_before_its_files",),
    ),
    Mutation(
        "health: any part of the gain that is given back is overfitting",
        "rather/tracking/health/rules.py",
        "GIVEN_BACK = 0.25",
        "GIVEN_BACK = 0.0",
        ("tests/health/test_health.py::test_a_held_out_loss_that_rises_counts_if_a_quarter_of_the_gain_is_given_back",),
    ),
    Mutation(
        "generate: positions of the shared prefill count the padding",
        "rather/model/generate.py",
        "positions = (seen.cumsum(1) - 1).clamp(min=0)",
        "positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)",
        ("tests/commands/test_generate.py::test_answers_are_those_of_a_loop_in_float64",),
    ),
    Mutation(
        "generate: every chunk has the same seed",
        "rather/commands/generate.py",
        "text = strict_json([self.work, number, ids])",
        "text = strict_json([self.work])",
        ("tests/commands/test_generate.py::test_equal_prompts_get_different_samples_in_each_chunk",),
    ),
    Mutation(
        "generate: the seed of a chunk is that of its prompts",
        "rather/commands/generate.py",
        "text = strict_json([self.work, number, ids])",
        "text = strict_json([self.work, ids])",
        ("tests/commands/test_generate.py::test_equal_prompts_get_different_samples_in_each_chunk",),
    ),
    Mutation(
        "trl: log-probs of the reference are kept when it moves",
        "rather/trl/trainers.py",
        "        trainer.known.clear()\n",
        "",
        ("tests/trl/test_numbers.py::test_log_history_is_trls",),
    ),
    Mutation(
        "bco: evaluations compare with their own mean",
        "rather/pipeline/evaluation.py",
        'kind == "mean" and self.running is not None',
        'kind == "mean" and False',
        ("tests/train/test_tasks.py::test_eval_prints_what_training_logged_last",),
    ),
    Mutation(
        "tune: a finalist beyond a limit may win",
        "rather/tools/tune.py",
        "usable = {name: every[name] for name in self.usable}",
        "usable = dict(every)",
        ("tests/pairs/test_tune.py::test_a_finalist_beyond_a_limit_does_not_win",),
    ),
    Mutation(
        "judge: the interval of a win rate is over verdicts",
        "rather/judges/compare.py",
        "low, high = interval(rates)",
        "low, high = interval([comparison.outcome for comparison in comparisons])",
        ("tests/commands/test_judge.py::test_four_answers_to_a_prompt_do_not_narrow_the_interval",),
    ),
)  # fmt: skip


def occurrences(mutation: Mutation, root: Path = ROOT) -> int:
    return (root / mutation.file).read_text(encoding="utf-8").count(mutation.before)


def is_caught(mutation: Mutation) -> bool:
    """Apply a mutation to a copy of the package; return whether its tests fail there."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        for name in COPIED:
            _copy(ROOT / name, copy / name)
        file = copy / mutation.file
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
        child = multiprocessing.get_context("fork").Process(target=_test, args=(copy, mutation))
        child.start()
        child.join(PATIENCE)
        if child.exitcode is None:
            child.kill()
            child.join()
            return True
        if child.exitcode not in (0, TESTS_FAILED):
            output = (copy / "output").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{mutation.what}: the tests did not run:\n{output}")
    return child.exitcode == TESTS_FAILED


def _test(copy: Path, mutation: Mutation) -> None:
    """Run the tests of a mutation in this child process; its exit code is that of pytest."""
    output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)  # for further processes that a test starts
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rather", "tests")]:
        del sys.modules[name]
    pytest = importlib.import_module("pytest")
    options = ["-q", "-x", "--all", "-p", "no:cacheprovider"]
    sys.exit(int(pytest.main([*options, *(str(copy / test) for test in mutation.tests)])))


def _copy(source: Path, target: Path) -> None:
    """Copy with the times of the files, so that compiled files in __pycache__ are still used."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def main(wanted: list[int]) -> int:
    for slow_import in ("pytest", "torch", "transformers"):  # once for all mutations, not for each
        importlib.import_module(slow_import)
    survived = 0
    for number, mutation in enumerate(MUTATIONS, start=1):
        if wanted and number not in wanted:
            continue
        found = occurrences(mutation)
        if found != 1:
            print(f"{number:2} NOT APPLIED  {mutation.what}: {found} places in {mutation.file}")
            survived += 1
            continue
        start = time.monotonic()
        caught = is_caught(mutation)
        survived += not caught
        seconds = time.monotonic() - start
        print(
            f"{number:2} {'caught' if caught else 'SURVIVED'}  {mutation.what} ({seconds:.0f} s)",
            flush=True,
        )
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
