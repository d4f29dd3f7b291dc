"""Between the contract's messages and our types: the only package that knows both sides' field
names.

Decoding checks what a message can be checked for by itself and names the field that is wrong; what
depends on the pipeline is the engine's business."""
