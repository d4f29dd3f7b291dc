// Calls a server that serves `echo`, at OMNI_GRPC_TARGET.
package omnigrpc

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
	pb "omni-grpc/gen/omni_grpc/v1"
)

func connect(t *testing.T) (context.Context, *Client) {
	t.Helper()
	target := os.Getenv("OMNI_GRPC_TARGET")
	if target == "" {
		t.Fatal("OMNI_GRPC_TARGET is not set")
	}
	client, err := Dial(target, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx, client
}

func scripted(t *testing.T, id string, script map[string]interface{}) *pb.AddRequestRequest {
	t.Helper()
	custom, err := structpb.NewStruct(script)
	if err != nil {
		t.Fatal(err)
	}
	request := Text("x")
	request.RequestId = id
	request.StageParams = []*pb.StageParams{{Stage: "text", Params: &pb.StageParams_Custom{Custom: custom}}}
	return request
}

func ended(ctx context.Context, t *testing.T, client *Client, id string) {
	t.Helper()
	for {
		results, err := client.Abort(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if results[0].GetOutcome() == pb.AbortResponse_OUTCOME_ALREADY_FINISHED {
			return
		}
	}
}

func TestTheWholeAnswer(t *testing.T) {
	ctx, client := connect(t)
	answer, err := client.Generate(ctx, Text("hello big world"))
	if err != nil {
		t.Fatal(err)
	}
	if answer.Text != "hello big world" || len(answer.Audio) != 14400 || answer.AudioFormat.GetSampleRateHz() != 24000 {
		t.Errorf("text %q, %d bytes of %v", answer.Text, len(answer.Audio), answer.AudioFormat)
	}
	if len(answer.Images) != 1 || string(answer.Images[0].Data[1:4]) != "PNG" || answer.Images[0].Width != 32 {
		t.Errorf("%d images", len(answer.Images))
	}
	if answer.Accepted.GetPipeline() != "echo" || answer.Finished.GetUsage().GetPromptTokens() != 3 {
		t.Errorf("%v, %v", answer.Accepted, answer.Finished)
	}
}

func TestARefusalIsTyped(t *testing.T) {
	ctx, client := connect(t)
	_, err := client.Generate(ctx, scripted(t, "", map[string]interface{}{"colour": "red"}))
	var failed *Error
	if !errors.As(err, &failed) {
		t.Fatalf("%v is no Error", err)
	}
	if failed.CodeName() != "INVALID_ARGUMENT" || failed.Reason != "INVALID_FIELD" || failed.Domain != "omni-grpc" {
		t.Errorf("%v", failed)
	}
	if len(failed.Violations) != 1 || failed.Violations[0].Field != "stage_params[0].custom.colour" {
		t.Errorf("%v", failed.Violations)
	}
	if failed.Pod == "" || failed.RetryAfter != 0 || status.Code(err) != codes.InvalidArgument {
		t.Errorf("%v from %q", failed.RetryAfter, failed.Pod)
	}
	if _, err := client.Abort(ctx); !errors.As(err, &failed) || failed.Violations[0].Field != "request_ids" {
		t.Errorf("a unary call gave %v", err)
	}
}

func TestLeavingAbortsTheRequest(t *testing.T) {
	ctx, client := connect(t)
	enough := errors.New("enough")
	request := scripted(t, "go-left-"+time.Now().String(), map[string]interface{}{"hang_at": 1})
	err := client.Stream(ctx, request, func(event *pb.AddRequestResponse) error {
		if event.GetOutput() != nil {
			return enough
		}
		return nil
	})
	if err != enough {
		t.Errorf("%v", err)
	}
	ended(ctx, t, client, request.RequestId)
}

func TestADeadlinePasses(t *testing.T) {
	ctx, client := connect(t)
	request := scripted(t, "go-late-"+time.Now().String(), map[string]interface{}{"hang_at": 1})
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	_, err := client.Generate(short, request)
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("%v", err)
	}
	ended(ctx, t, client, request.RequestId)
}

func TestInformationAndLoad(t *testing.T) {
	ctx, client := connect(t)
	info, err := client.ServerInfo(ctx)
	if err != nil || info.GetDefaultPipeline() != "echo" {
		t.Errorf("%v, %v", info, err)
	}
	stages, err := client.Load(ctx)
	if err != nil || len(stages) < 3 || stages[0].GetStage() != "text" {
		t.Errorf("%v, %v", stages, err)
	}
	results, err := client.Abort(ctx, "go-never")
	if err != nil || results[0].GetOutcome() != pb.AbortResponse_OUTCOME_NOT_FOUND {
		t.Errorf("%v, %v", results, err)
	}
}
