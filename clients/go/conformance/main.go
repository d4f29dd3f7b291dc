// Conformance runs a conformance list against a server: conformance ADDRESS LIST. It prints TAP; the rules are in
// tests/conformance/README.md.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand"
	"os"
	"reflect"
	"strings"
	"time"

	"github.com/golang/protobuf/proto"
	"google.golang.org/grpc"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"gopkg.in/yaml.v3"
	pb "omni-grpc/gen/omni_grpc/v1"
	"omni-grpc/omnigrpc"
)

const (
	service    = "/omni_grpc.v1.OmniService/"
	deadlineMS = 10_000
	eventually = 10 * time.Second
)

type method struct {
	path              string
	request, response proto.Message
}

var methods = map[string]method{
	"AddRequest":        {service + "AddRequest", &pb.AddRequestRequest{}, &pb.AddRequestResponse{}},
	"StreamingUpdate":   {service + "StreamingUpdate", &pb.StreamingUpdateRequest{}, &pb.StreamingUpdateResponse{}},
	"SubmitInteraction": {service + "SubmitInteraction", &pb.SubmitInteractionRequest{}, &pb.SubmitInteractionResponse{}},
	"Abort":             {service + "Abort", &pb.AbortRequest{}, &pb.AbortResponse{}},
	"GetServerInfo":     {service + "GetServerInfo", &pb.GetServerInfoRequest{}, &pb.GetServerInfoResponse{}},
	"GetLoad":           {service + "GetLoad", &pb.GetLoadRequest{}, &pb.GetLoadResponse{}},
	"Check":             {"/grpc.health.v1.Health/Check", &health.HealthCheckRequest{}, &health.HealthCheckResponse{}},
}

// call is a call under way; whatever its shape, a stream of messages both ways.
type call struct {
	rpc    string
	method method
	stream grpc.ClientStream
	cancel context.CancelFunc
	heard  []object
	err    error
}

func start(client *omnigrpc.Client, step object) *call {
	limit := int64(deadlineMS)
	if own, ok := step["deadline_ms"]; ok {
		limit = number(own)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(limit)*time.Millisecond)
	for name, value := range get(step, "metadata") {
		ctx = metadata.AppendToOutgoingContext(ctx, name, fmt.Sprint(value))
	}
	rpc := step["rpc"].(string)
	c := &call{rpc: rpc, method: methods[rpc], cancel: cancel}
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	c.stream, c.err = client.Conn.NewStream(ctx, desc, c.method.path)
	c.send(step)
	return c
}

// send sends messages. A call that has ended takes no notice; its end says why.
func (c *call) send(step object) {
	if c.err != nil {
		return
	}
	messages, _ := step["messages"].(list)
	for _, message := range messages {
		request := fresh(c.method.request)
		if err := protojson.Unmarshal(encoded(message), proto.MessageV2(request)); err != nil {
			log.Fatalf("%v: %v", message, err)
		}
		_ = c.stream.SendMsg(request)
	}
	if step["open"] != true {
		_ = c.stream.CloseSend()
	}
}

// read gives the next message; nil when the call has ended.
func (c *call) read() object {
	if c.err != nil {
		return nil
	}
	response := fresh(c.method.response)
	if c.err = c.stream.RecvMsg(response); c.err != nil {
		return nil
	}
	data, err := protojson.Marshal(proto.MessageV2(response))
	if err != nil {
		log.Fatal(err)
	}
	message := decoded(data)
	c.heard = append(c.heard, message)
	return message
}

func (c *call) outcome() Outcome {
	for c.read() != nil {
	}
	outcome := Outcome{messages: c.heard, code: "OK"}
	if c.stream != nil {
		headers, _ := c.stream.Header()
		outcome.headers, outcome.trailers = flat(headers), flat(c.stream.Trailer())
	}
	var failed *omnigrpc.Error
	if errors.As(c.err, &failed) {
		outcome.code, outcome.message = failed.CodeName(), failed.Message
		outcome.reason, outcome.domain = failed.Reason, failed.Domain
		outcome.retryMS = failed.RetryAfter.Milliseconds()
		for _, violation := range failed.Violations {
			outcome.fields = append(outcome.fields, violation.Field)
		}
	} else if c.err != io.EOF {
		log.Fatalf("%s failed with an untyped error: %v", c.rpc, c.err)
	}
	return outcome
}

func (c *call) end(step object) []string {
	return problems(c.rpc, get(step, "expect"), c.outcome())
}

func (c *call) await(wanted interface{}) []string {
	for message := c.read(); message != nil; message = c.read() {
		if matches(wanted, message) {
			return nil
		}
	}
	return []string{fmt.Sprintf("%s ended with %v before %v", c.rpc, c.err, wanted)}
}

func whole(client *omnigrpc.Client, step object) []string {
	for until := time.Now().Add(eventually); ; time.Sleep(50 * time.Millisecond) {
		c := start(client, step)
		found := c.end(step)
		c.cancel()
		if len(found) == 0 || step["eventually"] != true || time.Now().After(until) {
			return found
		}
	}
}

func take(client *omnigrpc.Client, step object, calls map[string]*call) []string {
	name := func(key string) string { return fmt.Sprint(step[key]) }
	switch {
	case step["start"] != nil:
		calls[name("start")] = start(client, step)
	case step["rpc"] != nil:
		return whole(client, step)
	case step["send"] != nil:
		calls[name("send")].send(step)
	case step["await"] != nil:
		return calls[name("await")].await(step["message"])
	case step["cancel"] != nil:
		calls[name("cancel")].cancel()
	case step["end"] != nil:
		return calls[name("end")].end(step)
	default:
		log.Fatalf("not a step: %v", step)
	}
	return nil
}

func runCase(client *omnigrpc.Client, template interface{}) []string {
	id := fmt.Sprintf("case-%012x", rand.Int63n(1<<48))
	one := decoded(bytes.ReplaceAll(encoded(template), []byte("${id}"), []byte(id)))
	calls := map[string]*call{}
	defer func() {
		for _, c := range calls {
			c.cancel()
		}
	}()
	steps, several := one["steps"].(list)
	if !several {
		steps = list{one}
	}
	for _, step := range steps {
		if found := take(client, step.(object), calls); len(found) > 0 {
			return found
		}
	}
	return nil
}

// fresh is an empty message of the same type. Debian's health package is of protobuf's older API, so that all are.
func fresh(message proto.Message) proto.Message {
	return reflect.New(reflect.TypeOf(message).Elem()).Interface().(proto.Message)
}

func encoded(value interface{}) []byte {
	data, err := json.Marshal(value)
	if err != nil {
		log.Fatal(err)
	}
	return data
}

func decoded(data []byte) object {
	var value object
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(&value); err != nil {
		log.Fatal(err)
	}
	return value
}

func flat(md metadata.MD) object {
	found := object{}
	for name, values := range md {
		found[name] = strings.Join(values, ",")
	}
	return found
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: conformance ADDRESS LIST")
	}
	rand.Seed(time.Now().UnixNano())
	data, err := os.ReadFile(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	var content struct{ Cases []object }
	if err := yaml.Unmarshal(data, &content); err != nil {
		log.Fatal(err)
	}
	client, err := omnigrpc.Dial(os.Args[1], omnigrpc.Options{})
	if err != nil {
		log.Fatal(err)
	}
	failed := 0
	fmt.Printf("1..%d\n", len(content.Cases))
	for n, one := range content.Cases {
		found := runCase(client, one)
		verdict := "ok"
		if len(found) > 0 {
			verdict = "not ok"
			failed = 1
		}
		fmt.Printf("%s %d - %s\n", verdict, n+1, one["name"])
		for _, problem := range found {
			fmt.Printf("  # %s\n", problem)
		}
	}
	client.Close()
	os.Exit(failed)
}
