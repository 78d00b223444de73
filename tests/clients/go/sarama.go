package main

import (
	"context"

	"github.com/IBM/sarama"
)

// claims is a member of a group that reads until show says that it was the last one.
type claims struct {
	show func(int32, int64, []byte, []byte) bool
	next chan *sarama.ConsumerMessage
	done context.CancelFunc
}

func (c *claims) Setup(session sarama.ConsumerGroupSession) error {
	go func() {
		for {
			select {
			case <-session.Context().Done():
				return
			case m := <-c.next:
				session.MarkMessage(m, "")
				if c.show(m.Partition, m.Offset, m.Key, m.Value) {
					session.Commit()
					c.done()
					return
				}
			}
		}
	}()
	return nil
}

func (c *claims) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (c *claims) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case <-s.Context().Done():
			return nil
		case m, more := <-claim.Messages():
			if !more {
				return nil
			}
			select {
			case c.next <- m:
			case <-s.Context().Done():
				return nil
			}
		}
	}
}

var sarama_ = client{
	consume: func(at where, show func(int64, []byte, []byte) bool) error {
		config := sarama.NewConfig()
		config.Version = sarama.V2_1_0_0
		config.Consumer.Fetch.Default = at.fetchBytes
		config.Consumer.Return.Errors = true
		c, err := sarama.NewConsumer(at.brokers, config)
		if err != nil {
			return err
		}
		p, err := c.ConsumePartition(at.topic, at.partition, at.offset)
		if err != nil {
			return err
		}
		for {
			select {
			case m := <-p.Messages():
				if show(m.Offset, m.Key, m.Value) {
					return nil
				}
			case failed := <-p.Errors():
				return failed
			}
		}
	},
	produce: func(at where) (func([]byte, []byte) (int64, error), error) {
		config := sarama.NewConfig()
		config.Version = sarama.V2_1_0_0
		config.Producer.RequiredAcks = sarama.WaitForAll
		config.Producer.Idempotent = true
		config.Net.MaxOpenRequests = 1
		config.Producer.Return.Successes = true
		config.Producer.Partitioner = sarama.NewManualPartitioner
		c, err := sarama.NewSyncProducer(at.brokers, config)
		return func(key, value []byte) (int64, error) {
			m := &sarama.ProducerMessage{Topic: at.topic, Partition: at.partition}
			if key != nil {
				m.Key = sarama.ByteEncoder(key)
			}
			if value != nil {
				m.Value = sarama.ByteEncoder(value)
			}
			_, offset, err := c.SendMessage(m)
			return offset, err
		}, err
	},
	group: func(as member, show func(int32, int64, []byte, []byte) bool) error {
		config := sarama.NewConfig()
		config.Version = sarama.V2_1_0_0
		config.Consumer.Offsets.Initial = sarama.OffsetOldest
		config.Consumer.Offsets.AutoCommit.Enable = false
		g, err := sarama.NewConsumerGroup(as.brokers, as.group, config)
		if err != nil {
			return err
		}
		defer g.Close()
		ctx, done := context.WithCancel(context.Background())
		handler := &claims{show, make(chan *sarama.ConsumerMessage), done}
		for ctx.Err() == nil {
			if err := g.Consume(ctx, []string{as.topic}, handler); err != nil {
				return err
			}
		}
		return nil
	},
	time: func(at where, ms int64) (int64, error) {
		config := sarama.NewConfig()
		config.Version = sarama.V2_1_0_0
		c, err := sarama.NewClient(at.brokers, config)
		if err != nil {
			return 0, err
		}
		defer c.Close()
		return c.GetOffset(at.topic, at.partition, ms)
	},
	load: func(at loading, tell func(loaded)) (func(string, string), func() error, error) {
		config := sarama.NewConfig()
		config.Version = sarama.V2_1_0_0
		config.Metadata.RefreshFrequency = at.metadata
		config.Producer.RequiredAcks = sarama.WaitForAll
		// Not idempotent: for each failure this version begins a new epoch, and sends under it
		// batches that were numbered under the one before (newer ones do not).
		config.Net.MaxOpenRequests = 1
		config.Producer.Return.Successes = true
		config.Producer.Partitioner = sarama.NewHashPartitioner
		c, err := sarama.NewAsyncProducer(at.brokers, config)
		if err != nil {
			return nil, nil, err
		}
		told := make(chan struct{})
		go func() {
			successes, errors := c.Successes(), c.Errors()
			for successes != nil || errors != nil {
				select {
				case m, ok := <-successes:
					if !ok {
						successes = nil
						continue
					}
					tell(loaded{m.Metadata.(string), m.Partition, m.Offset, ""})
				case failed, ok := <-errors:
					if !ok {
						errors = nil
						continue
					}
					tell(loaded{failed.Msg.Metadata.(string), failed.Msg.Partition, -1, failed.Err.Error()})
				}
			}
			close(told)
		}()
		send := func(key, value string) {
			c.Input() <- &sarama.ProducerMessage{
				Topic:    at.topic,
				Key:      sarama.StringEncoder(key),
				Value:    sarama.StringEncoder(value),
				Metadata: value,
			}
		}
		return send, func() error { c.AsyncClose(); <-told; return nil }, nil
	},
}
