"""The reader: OCR, by RapidOCR. Pictures in, the text on them out, a line per line.

engine_args: {threads: 1}
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rapidocr_onnxruntime import RapidOCR

from omni_grpc.ipc import StageSpec
from omni_grpc.stages.media import DecodedImage, load_media
from omni_grpc.stages.recognition import RecognitionStage
from omni_grpc.types import Media, Modality, StageFacts

DETECTION, DIRECTION, RECOGNITION = (
    "ch_PP-OCRv4_det_infer.onnx",
    "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "ch_PP-OCRv4_rec_infer.onnx",
)
"""The three models of the folder: where lines are, whether they stand on their head, what they
say."""

DETECTION_SIDE = 1280
"""In pixels. Recognition has the whole resolution."""

Pixels = NDArray[np.uint8]


class ReaderStage(RecognitionStage[Pixels]):
    """The stage of engine `ocr`."""

    modality: ClassVar = Modality.IMAGE
    nothing: ClassVar = "no text was found in it"

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        if self.workers != 1:
            # RapidOCR keeps a picture's state in itself.
            raise ValueError("a reader reads one picture at a time: give it replicas, not workers")

    async def load(self) -> StageFacts:
        folder = Path(self.spec.model)
        self._ocr: Any = await asyncio.to_thread(
            RapidOCR,
            det_model_path=str(folder / DETECTION),
            cls_model_path=str(folder / DIRECTION),
            rec_model_path=str(folder / RECOGNITION),
            # As PaddleOCR has it: lines are found on a picture of at most this size. RapidOCR's own
            # default enlarges small pictures, which takes ten times as long and finds no more.
            det_limit_type="max",
            det_limit_side_len=DETECTION_SIDE,
            intra_op_num_threads=self.threads,
            inter_op_num_threads=1,
        )
        name = "rapidocr-onnxruntime"
        return StageFacts(capacity=1, versions={name: metadata.version(name)})

    async def decode(self, media: Media, path: str) -> Pixels:
        picture = await load_media(media, self.policy, path)
        assert isinstance(picture, DecodedImage)
        return await asyncio.to_thread(np.asarray, picture.image)

    def recognize(self, item: Pixels) -> Iterator[str]:
        # It takes OpenCV's order, blue first.
        found, _ = self._ocr(np.ascontiguousarray(item[:, :, ::-1]))
        lines = (str(text).strip() for _, text, _ in found or ())
        yield "\n".join(line for line in lines if line)
