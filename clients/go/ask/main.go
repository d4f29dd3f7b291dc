// Ask asks, prints the text as it arrives and writes the speech to a WAV file.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	pb "omni-grpc/gen/omni_grpc/v1"
	"omni-grpc/omnigrpc"
)

func main() {
	target := flag.String("target", "localhost:50051", "the server's address")
	token := flag.String("token", "", "bearer token")
	timeout := flag.Float64("timeout", 60, "longest time, in seconds")
	pipeline := flag.String("pipeline", "", "the pipeline; empty: the server's default")
	out := flag.String("out", "answer.wav", "where speech is written")
	flag.Parse()

	request := omnigrpc.Text("What is the capital of France?")
	if flag.NArg() > 0 {
		request = omnigrpc.Text(strings.Join(flag.Args(), " "))
	}
	request.Pipeline = *pipeline
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(*timeout*float64(time.Second)))
	defer cancel()
	if err := ask(ctx, *target, *token, request, *out); err != nil {
		fmt.Fprintln(os.Stderr, err)
		var failed *omnigrpc.Error
		if errors.As(err, &failed) {
			for _, v := range failed.Violations {
				fmt.Fprintf(os.Stderr, "  %s: %s\n", v.Field, v.Description)
			}
		}
		os.Exit(1)
	}
}

func ask(ctx context.Context, target, token string, request *pb.AddRequestRequest, out string) error {
	client, err := omnigrpc.Dial(target, omnigrpc.Options{Token: token})
	if err != nil {
		return err
	}
	defer client.Close()
	var sound []byte
	var format *pb.AudioFormat
	err = client.Stream(ctx, request, func(event *pb.AddRequestResponse) error {
		switch content := event.GetOutput().GetContent().(type) {
		case *pb.Output_Text:
			fmt.Print(content.Text.GetText())
		case *pb.Output_Audio:
			sound = append(sound, content.Audio.GetData()...)
			format = content.Audio.GetFormat()
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Println()
	if format == nil {
		return nil
	}
	file, err := os.Create(out)
	if err != nil {
		return err
	}
	defer file.Close()
	return omnigrpc.WriteWAV(file, sound, format)
}
