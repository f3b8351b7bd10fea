#!/bin/sh
# The server under load on a CPU → cpu/serve_load.json (tiny models) and cpu/serve_load_smollm2.json.
# Every answer is held against LLM.generate's. From the root of the repository, with nothing else running.
set -eu
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python benchmarks/tiny_model.py "$folder/tiny"
ln -s "$PWD/tests/goldens/dspark_qwen3_tiny_vanilla_trained" "$folder/drafter"
output=$PWD/benchmarks/cpu
cd "$folder"
python -m jspark bench serve --engine-alone --concurrency 256 --requests 2000 --cancelled 0.1 --seeded 0.5 \
    --prompts 64 --prompt-tokens 1-480 --new-tokens 16 --output "$output/serve_load.json" \
    --server="--model-path tiny --speculative-draft-model-path drafter --max-running-requests 32 --single-shapes"
python -m jspark bench serve --engine-alone --concurrency 32 --requests 150 --cancelled 0.1 --seeded 0.5 \
    --prompts 8 --prompt-tokens 8-64 --new-tokens 16 --output "$output/serve_load_smollm2.json" \
    --server="--model-path smollm2-135m --speculative-algorithm DSPARK --context-length 128 --single-shapes \
        --chunked-prefill-size 64 --skip-draft-probe --verify-policy full"
