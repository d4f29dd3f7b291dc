package omnigrpc

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Violation says what is wrong with one field: its path from the message's root, and a description.
type Violation struct {
	Field, Description string
}

// Error is how a call ended that did not end with OK. Every call of a Client gives it: use errors.As.
type Error struct {
	// Code is gRPC's.
	Code codes.Code
	// Reason is the server's, "PIPELINE_NOT_FOUND" for instance; empty where gRPC itself made the status.
	Reason string
	// Domain is whose reason it is: "omni-grpc".
	Domain string
	// Message is for people.
	Message string
	// Violations are the fields that are wrong.
	Violations []Violation
	// RetryAfter is the least wait before a retry can help; 0: a retry does not help.
	RetryAfter time.Duration
	// RequestID and Pod are what the server says of itself.
	RequestID, Pod string

	status *status.Status
}

// CodeName is the code as the contract writes it, "NOT_FOUND" for instance.
func (e *Error) CodeName() string {
	return code.Code_name[int32(e.Code)]
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", strings.TrimSpace(e.CodeName()+" "+e.Reason), e.Message)
}

// GRPCStatus lets status.FromError and status.Code see through the error.
func (e *Error) GRPCStatus() *status.Status {
	return e.status
}

func typed(err error, trailers metadata.MD) error {
	if err == nil || err == io.EOF {
		return err
	}
	s := status.Convert(err)
	e := &Error{
		Code:      s.Code(),
		Message:   s.Message(),
		RequestID: first(trailers, "omni-request-id"),
		Pod:       first(trailers, "omni-pod"),
		status:    s,
	}
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			e.Reason, e.Domain = d.GetReason(), d.GetDomain()
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				e.Violations = append(e.Violations, Violation{v.GetField(), v.GetDescription()})
			}
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		}
	}
	return e
}

func first(md metadata.MD, name string) string {
	if values := md.Get(name); len(values) > 0 {
		return values[0]
	}
	return ""
}

func typedUnary(ctx context.Context, method string, request, response interface{}, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	var trailers metadata.MD
	err := invoke(ctx, method, request, response, conn, append(options, grpc.Trailer(&trailers))...)
	return typed(err, trailers)
}

func typedStream(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, conn, method, options...)
	if err != nil {
		return nil, typed(err, nil)
	}
	return typedClientStream{stream}, nil
}

type typedClientStream struct {
	grpc.ClientStream
}

func (s typedClientStream) RecvMsg(message interface{}) error {
	if err := s.ClientStream.RecvMsg(message); err != nil {
		return typed(err, s.Trailer())
	}
	return nil
}
