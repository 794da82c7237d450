"""Worked examples: what is asked, and the environment and command line that rank 0 of a role must be given."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Example(NamedTuple):
    """`args` go behind `k3hal plan`; `env` and `command` are those of `role`, in order."""

    args: str
    env: str
    command: str
    role: str = "server"

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.env.split())


PARSERS = "--enable-auto-tool-choice --tool-call-parser kimi_k3 --reasoning-parser kimi_k3"
KIMI = "vllm serve moonshotai/Kimi-K3 --trust-remote-code"
ATTENTION = """--attention-config '{"use_prefill_query_quantization":true,"mla_prefill_backend":"TOKENSPEED_MLA"}'"""
RAGGED = """--attention-config '{"use_prefill_query_quantization":true,"mla_prefill_backend":"TRTLLM_RAGGED"}'"""
DSPARK = (
    """--speculative-config '{"model":"RedHatAI/Kimi-K3-speculator.dspark", "num_speculative_tokens":8, """
    """"method": "dspark", "draft_sample_method": "probabilistic", "rejection_sample_method": "block"}'"""
)
LONG = (
    "--load-format fastsafetensors --no-enable-flashinfer-autotune --max-model-len 1048576 "
    f"--kv-cache-dtype fp8 {ATTENTION}"
)
BLACKWELL = f"{LONG} --enable-prefix-caching --attention-backend TOKENSPEED_MLA --prefix-match-unit 128"
HOPPER = (
    "--gpu-memory-utilization 0.97 --max-num-seqs 5 --max-model-len 32768 --moe-backend marlin "
    "--disable-custom-all-reduce --no-enable-flashinfer-autotune --max-num-batched-tokens 4096 "
    "--attention-backend FLASHMLA"
)
NODES = "GLOO_SOCKET_IFNAME=$IFACE_NAME NCCL_SOCKET_IFNAME=$IFACE_NAME"
BLACKWELL_ENV = "VLLM_ALLREDUCE_USE_FLASHINFER=1 VLLM_ENGINE_READY_TIMEOUT_S=3600 VLLM_USE_V2_MODEL_RUNNER=1"
HOPPER_ENV = (
    "VLLM_ENGINE_READY_TIMEOUT_S=3600 VLLM_USE_V2_MODEL_RUNNER=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
PIPELINE_ENV = "NCCL_CUMEM_ENABLE=1 VLLM_ENGINE_READY_TIMEOUT_S=3600 VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800"
HYBRID = "--enable-expert-parallel --data-parallel-hybrid-lb --data-parallel-size 16"
PD = "--hardware gb200 --strategy pd_cluster --prefill-nodes 2 --decode-nodes 4"
MEGA = "--moe-backend deep_gemm_mega_moe"
ALL = "tool_calling,reasoning"


def connector(role: str) -> str:
    value = f'{{"kv_connector":"NixlConnector","kv_role":"kv_{role}","kv_load_failure_policy":"fail"}}'
    return f"--kv-transfer-config '{value}'"


EXAMPLES = {
    "one node": Example(
        "--hardware b300 --strategy single_node_tp",
        BLACKWELL_ENV,
        f"{KIMI} --gpu-memory-utilization 0.95 --tensor-parallel-size 8 {BLACKWELL} {PARSERS}",
    ),
    "features after hardware": Example(
        f"--hardware b300 --features {ALL},spec_decoding,text_only,decode_context_parallelism",
        BLACKWELL_ENV,
        f"{KIMI} --gpu-memory-utilization 0.95 --tensor-parallel-size 8 --load-format fastsafetensors "
        "--no-enable-flashinfer-autotune --max-model-len 1048576 --kv-cache-dtype fp8 --enable-prefix-caching "
        f"--prefix-match-unit 128 {PARSERS} {DSPARK} --language-model-only --decode-context-parallel-size 8 "
        f"--dcp-comm-backend a2a --attention-backend TOKENSPEED_MLA {RAGGED}",
    ),
    "hopper over base": Example(
        "--hardware h200 --strategy multi_node_tp --nodes 2",
        f"{NODES} {HOPPER_ENV}",
        f"{KIMI} --tensor-parallel-size 16 --nnodes 2 --node-rank 0 --master-addr $HEAD_IP {HOPPER} {PARSERS}",
    ),
    "pipeline": Example(
        f"--hardware b200 --strategy multi_node_tp_pp --nodes 2 --features {ALL},spec_decoding",
        f"{NODES} {PIPELINE_ENV} VLLM_ALLREDUCE_USE_FLASHINFER=1 VLLM_USE_V2_MODEL_RUNNER=1",
        f"{KIMI} --tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 0 --master-addr $HEAD_IP "
        f"--gpu-memory-utilization 0.90 --max-num-batched-tokens 8192 {BLACKWELL} {PARSERS}",
    ),
    "experts over trays": Example(
        "--hardware gb200 --strategy multi_node_dep --nodes 4",
        f"{NODES} {BLACKWELL_ENV}",
        f"{KIMI} --gpu-memory-utilization 0.95 {HYBRID} --data-parallel-size-local 4 --data-parallel-address $HEAD_IP "
        f"{BLACKWELL} {MEGA} {PARSERS}",
    ),
    "experts over nodes": Example(
        "--hardware b200 --strategy multi_node_dep --nodes 2",
        f"{NODES} {BLACKWELL_ENV}",
        f"{KIMI} --gpu-memory-utilization 0.95 {HYBRID} --data-parallel-size-local 8 --data-parallel-address $HEAD_IP "
        f"{BLACKWELL} {PARSERS}",
    ),
    "prefill pool": Example(
        PD,
        "NCCL_CUMEM_ENABLE=1 NCCL_MNNVL_ENABLE=1 NCCL_NVLS_ENABLE=1 UCX_NET_DEVICES=all "
        "VLLM_NIXL_SIDE_CHANNEL_PORT=5557 VLLM_NIXL_SIDE_CHANNEL_HOST=$PREFILL_NODE_1 CUDA_VISIBLE_DEVICES=0,1,2,3 "
        f"{NODES} VLLM_SSM_CONV_STATE_LAYOUT=DS VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT=1 UCX_TLS=rc,cuda_copy",
        f"{KIMI} --gpu-memory-utilization 0.95 --port 8001 {connector('producer')} --tensor-parallel-size 8 "
        "--enable-expert-parallel --nnodes 2 --node-rank 0 --master-addr $PREFILL_NODE_1 "
        "--max-num-batched-tokens 16384 "
        f"--no-disable-hybrid-kv-cache-manager --no-enable-flashinfer-autotune {PARSERS}",
        "prefill",
    ),
    "decode pool": Example(
        PD,
        "VLLM_NIXL_SIDE_CHANNEL_PORT=5558 VLLM_NIXL_SIDE_CHANNEL_HOST=$DECODE_NODE_1 CUDA_VISIBLE_DEVICES=0,1,2,3 "
        f"{NODES} VLLM_SSM_CONV_STATE_LAYOUT=DS UCX_TLS=rc,cuda_copy",
        f"{KIMI} --gpu-memory-utilization 0.95 --port 8002 {connector('consumer')} "
        """--compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}' --tensor-parallel-size 1 """
        "--data-parallel-size 16 --data-parallel-size-local 4 --data-parallel-start-rank 0 "
        "--data-parallel-address $DECODE_NODE_1 --data-parallel-rpc-port $DECODE_DP_RPC_PORT --enable-expert-parallel "
        "--data-parallel-hybrid-lb --no-enable-prefix-caching --max-num-seqs 8 --max-num-batched-tokens 32 "
        f"--no-disable-hybrid-kv-cache-manager {MEGA} {PARSERS}",
        "decode",
    ),
    "ascend": Example(
        "--hardware ascend_910c --variant ascend_w4a8 --strategy multi_node_tp_dp --nodes 4 "
        f"--features {ALL},spec_decoding",
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True OMP_PROC_BIND=false OMP_NUM_THREADS=1 TASK_QUEUE_ENABLE=1 "
        f"HCCL_BUFFSIZE=800 VLLM_ENGINE_READY_TIMEOUT_S=7200 {NODES}",
        "vllm serve Eco-Tech/Kimi-K3-w4a8 --trust-remote-code --quantization ascend --enable-prefix-caching "
        "--enable-expert-parallel --max-num-seqs 16 --max-model-len 131072 --max-num-batched-tokens 24576 "
        """--gpu-memory-utilization 0.9 --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}' """
        "--mm-processor-cache-gb 0 "
        """--additional-config '{"enable_cpu_binding":true, "enable_flashcomm1":true}' --mm-encoder-tp-mode data """
        """--limit-mm-per-prompt '{"vision_chunk": 2}' --allowed-local-media-path / --tensor-parallel-size 16 """
        f"--data-parallel-size 4 --data-parallel-size-local 1 --data-parallel-address $HEAD_IP {PARSERS} "
        """--speculative-config '{"method":"dspark","model":"RedHatAI/Kimi-K3-speculator.dspark","""
        """"num_speculative_tokens":7,"enforce_eager":true}'""",
    ),
    "another precision": Example(
        "--hardware b300 --variant nvfp4",
        BLACKWELL_ENV,
        "vllm serve RedHatAI/Kimi-K3-NVFP4 --trust-remote-code --gpu-memory-utilization 0.95 --tensor-parallel-size 8 "
        f"{BLACKWELL} {PARSERS}",
    ),
    "hopper pipeline": Example(
        "--hardware h200 --strategy multi_node_tp_pp --nodes 2",
        f"{NODES} {PIPELINE_ENV} VLLM_USE_V2_MODEL_RUNNER=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        f"{KIMI} --tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 0 --master-addr $HEAD_IP "
        f"{HOPPER} {PARSERS}",
    ),
    # What a last-wins command line would keep side by side is unified here: the negation and the `=` form.
    "flags of the user": Example(
        "--hardware b300 --set '--max-model-len 262144' --set --no-enable-prefix-caching "
        "--set --gpu-memory-utilization=0.9 --set '--tool-call-parser other'",
        BLACKWELL_ENV,
        f"{KIMI} --tensor-parallel-size 8 --load-format fastsafetensors --no-enable-flashinfer-autotune "
        f"--kv-cache-dtype fp8 {ATTENTION} --attention-backend TOKENSPEED_MLA --prefix-match-unit 128 "
        f"--max-model-len 262144 --no-enable-prefix-caching --gpu-memory-utilization 0.9 {PARSERS}",
    ),
}
