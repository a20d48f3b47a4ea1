#!/bin/bash
# bash examples/qwen2.5-3B-dpo_megatron/run_dpo_pipeline.sh [key=value ...]
set -euo pipefail

CONFIG_PATH="examples/qwen2.5-3B-dpo_megatron"
CONFIG_NAME="dpo_config"

cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" examples/start_dpo_pipeline.py \
    --config_path "$CONFIG_PATH" \
    --config_name "$CONFIG_NAME" \
    "$@"
