"""Settings of what a run writes and sends (`logger`, `checkpoint`, `hub`), and of servers (`gateway`, `server`)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lockstep.trainer.config.conditions import HUB, PROJECTS, WANDB
from lockstep.trainer.setting import setting

NOT_INSTALLED = "its package is not installed where each change is tested"
STAND_IN = "tested with a stand-in of the hub"


@dataclass
class LoggerConfig:
    wandb: str = setting(
        "off",
        "Weights & Biases; auto: as the environment variable WANDB_MODE says, online without it",
        choices=("off", "auto", "online", "offline"),
    )
    tensorboard: bool = setting(False, "TensorBoard, with files in the run directory")
    mlflow: bool = setting(
        False,
        "MLflow, on the server MLFLOW_TRACKING_URI; without it in a database in the run directory",
        experimental=NOT_INSTALLED,
    )
    trackio: bool = setting(
        False,
        "Trackio, in TRACKIO_DIR or its default, or on TRACKIO_SPACE_ID or TRACKIO_SERVER_URL",
        experimental=NOT_INSTALLED,
    )
    swanlab: bool = setting(
        False,
        "SwanLab, as the environment variable SWANLAB_MODE says; without it offline, in the run directory",
        experimental=NOT_INSTALLED,
    )
    project: str = setting("lockstep", "project of W&B, Trackio and SwanLab, experiment of MLflow", when=PROJECTS)
    entity: str | None = setting(None, "W&B entity", when=WANDB)
    wandb_id: str | None = setting(
        None, "W&B run to continue; null: that of a resumed run, a new one for a fork", when=WANDB
    )
    group: str | None = setting(None, "group of related runs; in MLflow the tag group", when=PROJECTS)
    wandb_media_every: int = setting(
        10,
        "updates between rollout tables, token views and histograms in trackers, starting with the first; 0: never",
        low=0,
    )
    wandb_rollouts: int = setting(64, "maximum number of rollouts per table in trackers", low=0)
    print_rollouts: int = setting(1, "sample rollouts printed per report", low=0)
    print_rollouts_every: int = setting(10, "updates between printed sample rollouts; 0: never", low=0)
    peak_tflops: float | None = setting(
        None,
        "peak of one device in model.dtype, for perf/mfu (bfloat16: H100 SXM 989, A100 312) [10¹² FLOP/s]; null: not "
        "reported, nor for mixtures of experts",
        above=0,
    )
    save_rollouts: bool = setting(True, "write all rollouts of each step as JSONL into the run directory")

    @property
    def trackers(self) -> list[str]:
        """Enabled trackers other than W&B. Each name is that of the setting, the Python package and the extra."""
        return [name for name in ("tensorboard", "mlflow", "trackio", "swanlab") if getattr(self, name)]

    @property
    def wandb_mode(self) -> str | None:
        """W&B's mode with auto resolved; None if W&B's own settings decide."""
        return os.environ.get("WANDB_MODE") if self.wandb == "auto" else self.wandb


@dataclass
class CheckpointConfig:
    every: int = setting(20, "updates between checkpoints; 0: only at the end and on interruption", low=0)
    keep: int = setting(2, "checkpoints kept; older ones are deleted after a new one is published", low=1)


@dataclass
class HubConfig:
    repo: str | None = setting(None, "hub repository to upload the trained model to; null: none", experimental=STAND_IN)
    private: bool = setting(True, "make a new repository private", when=HUB)


@dataclass
class GatewayConfig:
    host: str = setting("127.0.0.1", "address of the gateway; other machines can reach it unless it is loopback")
    port: int = setting(0, "port of the gateway; 0: any free port; rank L of a machine: port + L", low=0, high=65535)
    api_key: str | None = setting(None, "key of clients; null: a random one for each run")
    model_name: str | None = setting(None, "model name for clients; null: the last part of model.path")
    max_request_mib: float = setting(64.0, "maximum size of a request [MiB]", above=0)


@dataclass
class ServerConfig:
    host: str = setting("127.0.0.1", "address of a server; other machines can reach it unless it is loopback")
    port: int = setting(8000, "port of the server", low=1, high=65535)
    vllm_args: list[str] = setting([], "further arguments for vLLM's server, for example [--tensor-parallel-size,2]")
