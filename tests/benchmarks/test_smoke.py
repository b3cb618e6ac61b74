"""Every benchmark still runs and prints its figures: a few seconds of each, which say nothing about the figures."""

from pathlib import Path

import pytest
from crew import run_program

pytestmark = pytest.mark.fleet

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = [*BENCHMARKS.glob("[a-z]*.py"), *BENCHMARKS.glob("papers/[a-z]*.py")]
FOUND = sorted(str(file.relative_to(BENCHMARKS).with_suffix("")) for file in FILES if file.stem != "common")
KEYS = {
    "auto": "calm_auto_over_adaptive calm_least stalls_auto_over_joint stalls_least",
    "chaos": "runs faults hangs crashes lost doubled unequal left restarts steps failed_seeds seconds",
    "convergence": "accuracy_sync accuracy_joint time_ratio whole_time_ratio spread_sync spread_joint seeds ways "
    "accuracy_gap accuracy_gap_error accuracy_gap_no_floor throughput_cost",
    "deep_forecast": "deep_over_true_bursts deep_over_last_bursts deep_over_oracle_periodic deep_over_last_periodic "
    "truncated_over_uncensored plan_ms_158 plan_ms_2175 train_s train_cpu_s seeds updates setting",
    "drift": "steps_to_recover each_repeat after_over_limit",
    "dynamic_weighting": "recovered_c loss_points_a loss_points_b recovered_c_each dataset seeds steps failures",
    "elastic_overhead": "elastic_over_fixed elastic_over_fixed_interval membership_ms",
    "feed_scale": "open_ms state_bytes indices_per_s",
    "frameworks": "lightning_over_ddp lightning_alone_over_plain accelerate_over_ddp accelerate_alone_over_plain "
    "trainer_over_ddp trainer_alone_over_plain",
    "goodput": "goodput goodput_by_pace lost doubled replicas_equal replay_off faults left_running seed",
    "goodput_model": "goodput simulated error failures start_s lost doubled replicas_equal left_running seed",
    "gpu_alone": "gpt124_over_plain gpt124_compiled_over_plain gpt4_over_plain gpt4_compiled_over_plain",
    "gpu_beside_cpu": "large_fleet_over_gpu large_cpu_samples large_ddp_over_gpu small_fleet_over_gpu",
    "gpu_unlike": "adaptive_over_limit adaptive_over_ddp conv_ddp_over_limit gpt_joint_over_limit gpt_auto_over_ddp",
    "hunted": "rounds trials hangs crashes unsound missed cases skipped_cases failed slowest_s seconds",
    "join_stall": "stall_steps stall_s equal cores",
    "kill": "survivors_s_median survivors_s_p95 freeze_s_median join_stall_s step_s kills freezes left_out "
    "torchft_over_paceline torchrun_over_paceline",
    "logging_cost": "us_per_step us_per_step_64_workers overhead overhead_cpu full_disk_warned_once "
    "deleted_folder_warned_once",
    "make_forecaster": "held_out bytes recipe sha256 clusters",
    "many_join": "pause_s slowed join_s entries step_s donor_states donors state_mb timed_out joiners cores",
    "micro_batch": "auto_over_best auto_over_best_by_round best auto_found samples_per_s",
    "network": "wire_over_float32 average_int8_over_average bf16_over_ddp_bf16_hook float32_over_ddp bf16_target_s "
    "two_sites_over_ddp plan_error",
    "overhead": "convnet_over_ddp mlp_over_ddp alone_over_plain convnet_over_ddp_interval",
    "passed_files": "adaptive death deadline",
    "pages": "report_s report_cpu_s report_mb viewers_cpu_4 viewers_cpu_100 step_to_viewer_s_4 step_to_viewer_s_100",
    "papers/p0": "epoch_over_best epoch_over_equal shares levels",
    "papers/p1": "saved_1_2 static_saved loss_gap steps_to_follow worth",
    "papers/p2": "wp_over_uniform wp_over_uniform_spread wp_over_uniform_momentum wp_over_uniform_momentum_spread "
    "wp_blind_over_uniform_momentum slow_over_fast seeds dataset",
    "papers/p3": "deep_over_static deep_over_elfving time_to_target_naive_over_deep time_to_target_naive_over_joint "
    "throughput_over_naive seconds_to_target target images seeds",
    "papers/p4": "recovered_c loss_points_a loss_points_b fleet_equals_twin fleet_twin_apart from_0_points_a "
    "arrival_over_round_s arrival_over_adaptive_s race_accuracy recovered_c_each datasets seeds steps failures",
    "peers": "peers versions no_link",
    "plan_scale": "ms_at_10 ms_at_1000 ms_at_10000 observe_ms_at_10000",
    "ray_kill": "survivors_s back_s lost doubled ray_train_over_paceline ray_train_s kills workers",
    "roster_scale": "members join_s form_s beat_ms beat_ms_p99 cpu reform_s reform_cpu_s",
    "same_numbers": "cases same unlike",
    "scale": "rows breaks breaks_first at slowest_row_s slowest_row_cpu_s",
    "schedules": "schedules faults points virtual_s wrong seconds",
    "sim_vs_real": "worst_error worst_step_by_step scenarios",
    "slow_network": "gradients_s gradients_accuracy average_s average_accuracy average_over_gradients",
    "spot": "finished lost doubled replicas_equal replay_off goodput trace hours started killed left_running",
    "stalls": "joint_over_limit joint_over_adaptive calm_joint_over_adaptive count_cv least_count calm_deadlines "
    "lost_thrown lost_catching_up lost_round lost_idle",
    "step_cost": "compute_ms cores sizes ours_ms_1 ddp_ms_2 extra_ms_2 over_ddp_2 cpu_ms_2 switches_2 large_over_ddp_2",
    "sum_of_speeds": "adaptive_over_limit adaptive_over_ddp epoch_over_limit saved_1_2 saved_1_3",
    "traces": "worst_joint_over_limit worst_joint_over_oracle calm_joint_over_naive stuck_joint_over_limit traces",
    "wire": "bf16_gap_points bf16_bytes fp16_gap_points average_int8_gap_points average_int8_bytes seeds",
    "wp_sgd": "settings workers lengths one_shot rounds",
    "zero_shot": "worst_over_elfving worst_over_smoothed worst_over_last worst_over_trained not_reached draw_ms_158",
}
"""What the last line of each is read for."""
OPTIONS = {"make_forecaster": ("--processes", "1")}  # a fresh process, which has to load torch


def test_every_benchmark_has_a_smoke_run() -> None:
    assert sorted(KEYS) == FOUND


@pytest.mark.long
@pytest.mark.parametrize("name", FOUND)
def test_a_benchmark_runs_to_its_end_and_prints_its_figures(name: str, tmp_path: Path) -> None:
    done = run_program(BENCHMARKS / f"{name}.py", tmp_path, "--smoke", *OPTIONS.get(name, ()), within=240)
    assert done.code == 0, done.err[-4000:]
    if "skipped" in done.value:
        pytest.skip(done.value["skipped"])
    assert {*KEYS[name].split()} <= done.value.keys()
