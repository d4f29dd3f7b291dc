package omnigrpc

import (
	"bytes"
	"encoding/binary"
	"io"

	pb "omni-grpc/gen/omni_grpc/v1"
)

// Image is a picture: the bytes of a file.
type Image struct {
	Data          []byte
	MimeType      string
	Width, Height uint32
}

// Answer is all that a request gave. What the pipeline does not make, or was not asked for, is empty. Several answers
// (n above 1) are joined; read the events to tell them apart.
type Answer struct {
	Accepted *pb.Accepted
	Finished *pb.Finished
	Text     string
	// Audio holds whole samples in AudioFormat's encoding.
	Audio       []byte
	AudioFormat *pb.AudioFormat
	Images      []Image
	// Video holds the parts of a film, joined.
	Video []byte

	parts bytes.Buffer
}

func (a *Answer) add(event *pb.AddRequestResponse) error {
	if accepted := event.GetAccepted(); accepted != nil {
		a.Accepted = accepted
	}
	if finished := event.GetFinished(); finished != nil {
		a.Finished = finished
	}
	switch content := event.GetOutput().GetContent().(type) {
	case *pb.Output_Text:
		a.Text += content.Text.GetText()
	case *pb.Output_Audio:
		a.Audio = append(a.Audio, content.Audio.GetData()...)
		a.AudioFormat = content.Audio.GetFormat()
	case *pb.Output_Image:
		a.addPart(content.Image)
	case *pb.Output_Video:
		a.Video = append(a.Video, content.Video.GetData()...)
	}
	return nil
}

func (a *Answer) addPart(part *pb.ImageChunk) {
	a.parts.Write(part.GetData())
	if part.GetLast() {
		data := append([]byte(nil), a.parts.Bytes()...)
		a.Images = append(a.Images, Image{data, part.GetMimeType(), part.GetWidth(), part.GetHeight()})
		a.parts.Reset()
	}
}

// WriteWAV writes sound as a WAV file: RIFF/WAVE, 16-bit PCM or 32-bit float as the format says.
func WriteWAV(w io.Writer, data []byte, format *pb.AudioFormat) error {
	tag, sampleBytes := uint16(1), uint32(2)
	if format.GetEncoding() == pb.AudioEncoding_AUDIO_ENCODING_PCM_F32LE {
		tag, sampleBytes = 3, 4
	}
	frameBytes := sampleBytes * format.GetChannels()
	var file bytes.Buffer
	for _, field := range []interface{}{
		[]byte("RIFF"), uint32(36 + len(data)), []byte("WAVEfmt "), uint32(16),
		tag, uint16(format.GetChannels()), format.GetSampleRateHz(), format.GetSampleRateHz() * frameBytes,
		uint16(frameBytes), uint16(8 * sampleBytes),
		[]byte("data"), uint32(len(data)), data,
	} {
		// A bytes.Buffer takes whatever has a fixed size.
		_ = binary.Write(&file, binary.LittleEndian, field)
	}
	_, err := file.WriteTo(w)
	return err
}
