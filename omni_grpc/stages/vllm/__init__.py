"""The autoregressive stage: vLLM's AsyncLLM in a replica, its engine core in a child.

stage    the six verbs
prompt   a prompt as the engine takes it: template, tokens, embeddings, media
media    pictures, sound and film under keys of this replica
params   our parameters as vLLM's, and vLLM's refusals as ours
answer   one request in the engine, to its last word
outputs  what the engine gives, as ours
session  a conversation on one KV cache
"""

from omni_grpc.stages.vllm.stage import VllmStage

__all__ = ["VllmStage"]
