package main

import (
	"context"
	"time"

	"github.com/segmentio/kafka-go"
)

var kafkaGo = client{
	consume: func(at where, show func(int64, []byte, []byte) bool) error {
		r := kafka.NewReader(kafka.ReaderConfig{
			Brokers:   at.brokers,
			Topic:     at.topic,
			Partition: int(at.partition),
			MinBytes:  1,
			MaxBytes:  int(at.fetchBytes),
		})
		defer r.Close()
		if err := r.SetOffset(at.offset); err != nil {
			return err
		}
		for {
			m, err := r.ReadMessage(context.Background())
			if err != nil {
				return err
			}
			if show(m.Offset, m.Key, m.Value) {
				return nil
			}
		}
	},
	produce: func(at where) (func([]byte, []byte) (int64, error), error) {
		// Its Writer does not tell offsets; the client below it does.
		c := &kafka.Client{Addr: kafka.TCP(at.brokers...)}
		return func(key, value []byte) (int64, error) {
			m := kafka.Record{}
			if key != nil {
				m.Key = kafka.NewBytes(key)
			}
			if value != nil {
				m.Value = kafka.NewBytes(value)
			}
			done, err := c.Produce(context.Background(), &kafka.ProduceRequest{
				Topic:        at.topic,
				Partition:    int(at.partition),
				RequiredAcks: kafka.RequireAll,
				Records:      kafka.NewRecordReader(m),
			})
			if err == nil {
				err = done.Error
			}
			if err != nil {
				return 0, err
			}
			return done.BaseOffset, nil
		}, nil
	},
	group: func(as member, show func(int32, int64, []byte, []byte) bool) error {
		r := kafka.NewReader(kafka.ReaderConfig{
			Brokers:     as.brokers,
			Topic:       as.topic,
			GroupID:     as.group,
			StartOffset: kafka.FirstOffset,
			MinBytes:    1,
			MaxBytes:    1 << 20,
		})
		defer r.Close()
		var read []kafka.Message
		for {
			m, err := r.FetchMessage(context.Background())
			if err != nil {
				return err
			}
			read = append(read, m)
			if show(int32(m.Partition), m.Offset, m.Key, m.Value) {
				return r.CommitMessages(context.Background(), read...)
			}
		}
	},
	time: func(at where, ms int64) (int64, error) {
		c := &kafka.Client{Addr: kafka.TCP(at.brokers...)}
		told, err := c.ListOffsets(context.Background(), &kafka.ListOffsetsRequest{
			Topics: map[string][]kafka.OffsetRequest{
				at.topic: {kafka.TimeOffsetOf(int(at.partition), time.UnixMilli(ms))},
			},
		})
		if err != nil {
			return 0, err
		}
		found := told.Topics[at.topic][0]
		for offset := range found.Offsets {
			return offset, found.Error
		}
		return -1, found.Error
	},
}
