#!/usr/bin/env bash
# Runs in the folder of the workflow, within the new environment. On Linux, pip's torch is the CUDA build.
set -euo pipefail
python -m pip install torch==2.13.0
python -m pip install --requirement envs/requirements.lock --requirement envs/gpu.lock --editable '.[workflow]'
