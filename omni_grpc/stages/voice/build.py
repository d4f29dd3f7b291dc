"""Cuts hibari's one model into the two that the voice's stages run.

The cut is the decoder's input, where the graph is narrowest: 130 channels per frame.
"""

from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx.utils import Extractor

from omni_grpc.stages.voice.acoustic import CHANNELS, open_session

SPECTRA = ("lh", "theta", "ln", "lr", "phi")
_DECODER_WEIGHT = "m.dec_in.weight"


def build(out: Path) -> None:
    """Writes `acoustic.onnx` and `decoder.onnx` into the existing folder `out`.

    acoustic: ids int64 [1, L], speed float32 [1] → conditioning float32 [1, 130, F], f0 [1, F] (Hz)
    decoder: conditioning → lh, theta, ln, lr, phi, each float32 [1, 601, F]

    Source: `assets/hibari.onnx` of the installed hibari-tts, voice "heart". Raises RuntimeError
    if that model has no such cut, or if the halves don't compute exactly what the whole does.
    """
    with as_file(files("hibari") / "assets" / "hibari.onnx") as whole:
        model = onnx.load(whole)
        cut = _cut_tensor(model.graph)
        shape: list[str | int | None] = [1, CHANNELS, "frames"]
        model.graph.value_info.append(
            onnx.helper.make_tensor_value_info(cut, onnx.TensorProto.FLOAT, shape)
        )
        extractor = Extractor(model)
        onnx.save(extractor.extract_model(["ids", "speed"], [cut, "f0"]), out / "acoustic.onnx")
        onnx.save(extractor.extract_model([cut], list(SPECTRA)), out / "decoder.onnx")
        _check(whole, out)


def _cut_tensor(graph: onnx.GraphProto) -> str:
    """The one input of the decoder's first convolution that isn't a weight.

    Found by the weight's name, which comes from the trained module; the tensor's own name is
    whatever number the exporter had reached.
    """
    heads = [
        node.input[0]
        for node in graph.node
        if node.op_type == "Conv" and _DECODER_WEIGHT in node.input
    ]
    if len(heads) != 1:
        raise RuntimeError(f"hibari.onnx: {len(heads)} convolutions use {_DECODER_WEIGHT}, not one")
    cut: str = heads[0]
    return cut


def _check(whole: Path, out: Path) -> None:
    """Raises RuntimeError unless the halves in a row equal the whole, bit for bit."""
    inputs = {"ids": np.array([[0, *range(10, 50), 0]]), "speed": np.ones(1, np.float32)}
    expected = _run(open_session(whole), [*SPECTRA, "f0"], inputs)
    acoustic = open_session(out / "acoustic.onnx")
    conditioning, f0 = _run(acoustic, [output.name for output in acoustic.get_outputs()], inputs)
    decoder = open_session(out / "decoder.onnx")
    spectra = _run(decoder, list(SPECTRA), {decoder.get_inputs()[0].name: conditioning})
    if conditioning.shape != (1, CHANNELS, f0.shape[1]):
        raise RuntimeError(f"hibari.onnx: conditioning has shape {conditioning.shape}")
    for name, want, got in zip((*SPECTRA, "f0"), expected, [*spectra, f0], strict=True):
        if not np.array_equal(want, got):
            raise RuntimeError(f"hibari.onnx: cut in two it computes another {name}")


def _run(
    session: ort.InferenceSession, names: list[str], inputs: dict[str, np.ndarray]
) -> list[np.ndarray]:
    outputs: list[np.ndarray] = session.run(names, inputs)
    return outputs
