"""OpenVINO GenAI, run by an interpreter that has it: ``python _openvino.py FOLDER MADE TOKENS THREADS``.

It writes a Hugging Face folder as OpenVINO's own files with optimum-intel, says ``ready``, then reads a list of prompts
(token IDs, JSON) a line, and answers each line with the tokens that greedy decoding writes.
:mod:`benchmarks.serving` starts it where it is installed or ``CAPIBARA_OPENVINO_PYTHON`` names such an interpreter.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np


def main() -> None:
    folder, made, tokens, threads = sys.argv[1:]
    # What the libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]
    from optimum.exporters.openvino import main_export  # pyright: ignore[reportMissingImports]

    main_export(folder, output=made, task="text-generation-with-past", convert_tokenizer=True)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_batched_tokens = 1024  # all prompts in one step
    scheduler.dynamic_split_fuse = False
    # By default it computes in bfloat16 where the processor does, and keeps the cache in 8 bits.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": int(threads), **exact}
    pipeline = genai.ContinuousBatchingPipeline(made, scheduler, "CPU", options)
    config = genai.GenerationConfig(
        max_new_tokens=int(tokens),
        min_new_tokens=int(tokens),
        ignore_eos=True,
        do_sample=False,
        apply_chat_template=False,
    )
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts = [openvino.Tensor(np.asarray([prompt], np.int64)) for prompt in json.loads(line)]
        found = pipeline.generate(prompts, [config] * len(prompts))
        print(json.dumps([list(one.m_generation_ids[0]) for one in found]), file=answers, flush=True)


if __name__ == "__main__":
    main()
