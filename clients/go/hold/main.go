// Hold holds a connection with the shortest pings that the server takes: one call, silence until stdin ends, another
// call.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"omni-grpc/omnigrpc"
)

func main() {
	pings := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}
	options := omnigrpc.Options{Dial: []grpc.DialOption{grpc.WithKeepaliveParams(pings)}}
	client, err := omnigrpc.Dial(os.Args[1], options)
	if err != nil {
		log.Fatal(err)
	}
	call := func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if _, err := client.ServerInfo(ctx); err != nil {
			log.Fatal(err)
		}
	}
	call()
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin)
	call()
}
