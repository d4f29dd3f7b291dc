package main

import (
	"encoding/base64"
	"fmt"
	"reflect"
	"sort"
	"strings"
)

// The rules are in tests/conformance/README.md.

type object = map[string]interface{}
type list = []interface{}

const (
	maxAudio       = 64 << 10
	maxMessage     = 1 << 20
	bytesPerSample = 2
)

// Outcome is what came of a call.
type Outcome struct {
	messages                      []object
	code, message, domain, reason string
	fields                        []string
	retryMS                       int64
	headers, trailers             object
}

func absent(value interface{}) bool {
	switch v := value.(type) {
	case object:
		return len(v) == 0
	case list:
		return len(v) == 0
	case nil:
		return true
	}
	text := fmt.Sprint(value)
	return text == "" || text == "0" || text == "false"
}

// matches says whether a value has the expected form.
func matches(expected, found interface{}) bool {
	if expected == "*" {
		return !absent(found)
	}
	if wanted, ok := expected.(object); ok {
		given, ok := found.(object)
		for name, value := range wanted {
			ok = ok && matches(value, given[name])
		}
		return ok
	}
	if wanted, ok := expected.(list); ok && len(wanted) > 0 {
		given, ok := found.(list)
		ok = ok && len(given) == len(wanted)
		for n := 0; ok && n < len(wanted); n++ {
			ok = matches(wanted[n], given[n])
		}
		return ok
	}
	return absent(expected) && absent(found) || fmt.Sprint(expected) == fmt.Sprint(found)
}

// checker collects what is wrong with the outcome of a call.
type checker struct {
	Outcome
	rpc    string
	expect object
	found  []string
}

func problems(rpc string, expect object, outcome Outcome) []string {
	c := &checker{Outcome: outcome, rpc: rpc, expect: expect}
	c.status()
	for name, found := range map[string]object{"headers": c.headers, "trailers": c.trailers} {
		if wanted, ok := expect[name]; ok && !matches(wanted, found) {
			c.wrong("%s are %v, not %v", name, found, wanted)
		}
	}
	if rpc == "AddRequest" || rpc == "SubmitInteraction" {
		c.stream()
	} else if (len(c.messages) == 1) != (c.code == "OK") || len(c.messages) > 1 {
		c.wrong("%d messages came with %s", len(c.messages), c.code)
	}
	c.inOrder()
	return c.found
}

func (c *checker) wrong(format string, values ...interface{}) {
	c.found = append(c.found, fmt.Sprintf(format, values...))
}

func (c *checker) inOrder() {
	place := 0
	wanted, _ := c.expect["messages"].(list)
	for _, message := range wanted {
		for place < len(c.messages) && !matches(message, c.messages[place]) {
			place++
		}
		if place++; place > len(c.messages) {
			c.wrong("no message (behind those found before) is %v", message)
			return
		}
	}
}

func (c *checker) status() {
	code := "OK"
	if wanted, ok := c.expect["code"].(string); ok {
		code = wanted
	}
	if c.code != code {
		c.wrong("code is %s, not %s (%s %s)", c.code, code, c.reason, c.message)
	}
	if says, _ := c.expect["says"].(string); !strings.Contains(c.message, says) {
		c.wrong("message is %q, it does not say %q", c.message, says)
	}
	reason, checked := c.expect["reason"].(string)
	if !checked {
		return
	}
	if c.reason != reason {
		c.wrong("reason is %q, not %q", c.reason, reason)
	}
	if reason != "" && c.domain != "omni-grpc" {
		c.wrong("domain is %q", c.domain)
	}
	if wanted := texts(c.expect["fields"]); !reflect.DeepEqual(sorted(c.fields), sorted(wanted)) {
		c.wrong("fields are %v, not %v", c.fields, wanted)
	}
	if retry, _ := c.expect["retry"].(bool); (c.retryMS > 0) != retry {
		c.wrong("retry is %d ms", c.retryMS)
	}
	if pushback := c.trailers["grpc-retry-pushback-ms"]; !matches(fmt.Sprint(c.retryMS), pushback) {
		c.wrong("the pushback is %v, RetryInfo says %d", pushback, c.retryMS)
	}
}

func (c *checker) stream() {
	var kinds, runs []string
	var events []object
	for _, message := range c.messages {
		event, answered := message["response"].(object)
		if c.rpc == "AddRequest" {
			event, answered = message, true
		}
		if answered {
			events = append(events, event)
		}
		kind := kindOf(message)
		if len(kinds) == 0 || kinds[len(kinds)-1] != kind {
			runs = append(runs, kind)
		}
		kinds = append(kinds, kind)
	}
	c.order(kinds, events)
	c.contiguous(events)
	if wanted, ok := c.expect["kinds"]; ok && !reflect.DeepEqual(runs, texts(wanted)) {
		c.wrong("kinds are %v, not %v", runs, wanted)
	}
	c.sums(events)
}

// sums checks text and bytes of the newest epoch.
func (c *checker) sums(events []object) {
	text, size := map[string]string{}, map[string]int{}
	for _, event := range events {
		output := get(event, "output")
		if number(event["epoch"]) != number(events[len(events)-1]["epoch"]) || output == nil {
			continue
		}
		stage := fmt.Sprint(output["stage"])
		if part, ok := get(output, "text")["text"].(string); ok {
			text[stage] += part
		}
		size[stage] += sizeOf(output)
	}
	for stage, wanted := range get(c.expect, "text") {
		if text[stage] != wanted {
			c.wrong("text of %s is %q, not %q", stage, text[stage], wanted)
		}
	}
	for stage, wanted := range get(c.expect, "bytes") {
		if int64(size[stage]) != number(wanted) {
			c.wrong("%s gave %d bytes, not %v", stage, size[stage], wanted)
		}
	}
}

func (c *checker) order(kinds []string, events []object) {
	accepted := 0
	for n, kind := range kinds {
		if kind == "accepted" {
			accepted++
		}
		last := n == len(kinds)-1
		if c.rpc == "AddRequest" && (kind == "finished") != (last && c.code == "OK") {
			c.wrong("%s came at %d of %d, with %s", kind, n, len(kinds), c.code)
		}
	}
	if c.rpc == "AddRequest" && len(kinds) > 0 && kinds[0] != "accepted" {
		c.wrong("the first event is %s", kinds[0])
	}
	if c.rpc == "AddRequest" && c.code == "OK" && len(kinds) == 0 {
		c.wrong("nothing came")
	}
	if accepted > 1 {
		c.wrong("accepted came twice")
	}
	for n, event := range events {
		seq := number(event["seq"])
		if n == 0 && accepted > 0 && seq != 0 {
			c.wrong("seq begins with %d", seq)
		}
		if n > 0 && seq != number(events[n-1]["seq"])+1 {
			c.wrong("seq has a gap at %d", seq)
		}
		if n > 0 && number(event["epoch"]) < number(events[n-1]["epoch"]) {
			c.wrong("the epoch falls at seq %d", seq)
		}
	}
}

func (c *checker) contiguous(events []object) {
	nextSample, nextOffset := map[string]int64{}, map[string]int64{}
	for _, event := range events {
		output := get(event, "output")
		stage, size := fmt.Sprint(output["stage"]), int64(sizeOf(output))
		audio, image := get(output, "audio"), get(output, "image")
		if size > maxMessage || audio != nil && size > maxAudio {
			c.wrong("an output of %s has %d bytes", stage, size)
		}
		if audio != nil {
			start := number(audio["startSample"])
			if due, known := nextSample[stage]; known && start != due {
				c.wrong("start_sample is %d, not %d", start, due)
			}
			nextSample[stage] = start + size/bytesPerSample
		}
		if image != nil {
			key := fmt.Sprint(stage, number(event["epoch"]))
			if offset := number(image["offset"]); offset != nextOffset[key] {
				c.wrong("offset is %d, not %d", offset, nextOffset[key])
			}
			nextOffset[key] += size
			if image["last"] == true {
				nextOffset[key] = 0
			}
		}
	}
}

func kindOf(message object) string {
	if event := get(message, "response"); event != nil {
		message = event
	}
	for name := range message {
		if name != "seq" && name != "epoch" {
			return name
		}
	}
	return ""
}

func sizeOf(output object) int {
	part := get(output, "audio")
	if part == nil {
		part = get(output, "image")
	}
	data, _ := part["data"].(string)
	size, _ := base64.StdEncoding.DecodeString(data)
	return len(size)
}

func get(from object, name string) object {
	value, _ := from[name].(object)
	return value
}

func number(value interface{}) int64 {
	var n int64
	fmt.Sscan(fmt.Sprint(value), &n)
	return n
}

func texts(value interface{}) []string {
	var found []string
	values, _ := value.(list)
	for _, one := range values {
		found = append(found, fmt.Sprint(one))
	}
	return found
}

func sorted(values []string) []string {
	ordered := append([]string(nil), values...)
	sort.Strings(ordered)
	return ordered
}
