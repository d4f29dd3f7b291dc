/** Typed client of omni-grpc. See README.md, and `OmniClient`. */

export { Answer, Audio, Image, collect } from "./answer";
export { CallLimits, OmniClient, OmniOptions, Request } from "./client";
export { OmniError, ProtocolError, Violation } from "./errors";
export { wav } from "./wav";
export * from "../gen/omni_grpc/v1/service";
export { AudioEncoding, AudioFormat, DataType, Modality, Tensor } from "../gen/omni_grpc/v1/common";
export { FinishReason } from "../gen/omni_grpc/v1/output";
