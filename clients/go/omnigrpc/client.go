// Package omnigrpc is a client of omni-grpc: one prompt in; text, sound, pictures and film stream back.
package omnigrpc

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	pb "omni-grpc/gen/omni_grpc/v1"
)

// Client is a client of one server, for any number of calls at once. A call's deadline is its context's; cancelling
// the context aborts the request on the server. Every call fails with *Error.
type Client struct {
	// Stub is the generated stub, for what Client does not wrap (sessions, streamed input).
	Stub pb.OmniServiceClient
	// Conn is the connection.
	Conn *grpc.ClientConn
}

// Options say how a server is reached.
type Options struct {
	// TLS is used where it is set; nil: plain text.
	TLS credentials.TransportCredentials
	// Token is sent as "authorization: Bearer ..." with every call.
	Token string
	// Dial are further options of gRPC's own.
	Dial []grpc.DialOption
}

// A model can think for minutes in silence: pings tell a dead peer from a busy one. The server takes one every 10 s.
// Message limits stay gRPC's own: no message of the contract is larger than 1 MiB.
var pings = keepalive.ClientParameters{Time: time.Minute, Timeout: 20 * time.Second}

// Dial makes a client of the server at target, "localhost:50051" for instance. It connects with the first call.
func Dial(target string, options Options) (*Client, error) {
	dial := []grpc.DialOption{
		grpc.WithKeepaliveParams(pings),
		grpc.WithChainUnaryInterceptor(typedUnary),
		grpc.WithChainStreamInterceptor(typedStream),
	}
	if options.TLS == nil {
		dial = append(dial, grpc.WithInsecure())
	} else {
		dial = append(dial, grpc.WithTransportCredentials(options.TLS))
	}
	if options.Token != "" {
		dial = append(dial, grpc.WithPerRPCCredentials(bearer{options.Token, options.TLS != nil}))
	}
	conn, err := grpc.Dial(target, append(dial, options.Dial...)...)
	if err != nil {
		return nil, err
	}
	return &Client{pb.NewOmniServiceClient(conn), conn}, nil
}

// Close closes the connection; calls that still run are cancelled.
func (c *Client) Close() error {
	return c.Conn.Close()
}

// Text is a request with a text prompt.
func Text(prompt string) *pb.AddRequestRequest {
	return &pb.AddRequestRequest{Prompt: &pb.Prompt{Content: &pb.Prompt_Text{Text: prompt}}}
}

// Stream submits a request and calls handle with each of its events: accepted first, finished last. An error of
// handle ends the call, which aborts the request, and is returned.
func (c *Client) Stream(ctx context.Context, request *pb.AddRequestRequest,
	handle func(*pb.AddRequestResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if id := request.GetRequestId(); id != "" {
		// Gateways hash on it, so that all calls about one request meet on one server.
		ctx = metadata.AppendToOutgoingContext(ctx, "omni-request-id", mirrored(id))
	}
	call, err := c.Stub.AddRequest(ctx, request)
	if err != nil {
		return err
	}
	for next := uint64(0); ; next++ {
		event, err := call.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if event.GetSeq() != next {
			return fmt.Errorf("omnigrpc: event %d came where %d was due", event.GetSeq(), next)
		}
		if err := handle(event); err != nil {
			return err
		}
	}
}

// Generate gives the whole answer.
func (c *Client) Generate(ctx context.Context, request *pb.AddRequestRequest) (*Answer, error) {
	answer := &Answer{}
	if err := c.Stream(ctx, request, answer.add); err != nil {
		return nil, err
	}
	return answer, nil
}

// Abort aborts requests: what became of each, in the order asked.
func (c *Client) Abort(ctx context.Context, requestIDs ...string) ([]*pb.AbortResponse_Result, error) {
	response, err := c.Stub.Abort(ctx, &pb.AbortRequest{RequestIds: requestIDs})
	return response.GetResults(), err
}

// ServerInfo tells what is served: pipelines, stages, modalities, formats, limits, capabilities.
func (c *Client) ServerInfo(ctx context.Context) (*pb.GetServerInfoResponse, error) {
	return c.Stub.GetServerInfo(ctx, &pb.GetServerInfoRequest{})
}

// Load is the present load of every stage and replica.
func (c *Client) Load(ctx context.Context) ([]*pb.StageLoad, error) {
	response, err := c.Stub.GetLoad(ctx, &pb.GetLoadRequest{})
	return response.GetStages(), err
}

type bearer struct {
	token  string
	secure bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}

func (b bearer) RequireTransportSecurity() bool {
	return b.secure
}

func mirrored(id string) string {
	for _, r := range id {
		if r < ' ' || r > '~' {
			return url.PathEscape(id)
		}
	}
	return id
}
