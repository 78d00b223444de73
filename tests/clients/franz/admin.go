// Moves of partitions with franz-go's admin client, for ../test_reassignments.py.
package main

import (
	"context"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// administer answers "reassign" (values "0:3,2" of partition and replicas), "cancel" (partitions)
// and "moves", all of one topic.
func administer(a asked) ([]string, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(a.Bootstrap, ",")...))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	if a.Do == "moves" {
		return moves(admin, a.Topic)
	}
	var req kadm.AlterPartitionAssignmentsReq
	for _, value := range a.Values {
		index, list, _ := strings.Cut(value, ":")
		partition, err := strconv.ParseInt(index, 10, 32)
		if err != nil {
			return nil, err
		}
		if a.Do == "cancel" {
			req.CancelAssign(a.Topic, int32(partition))
			continue
		}
		replicas, err := numbers(list)
		if err != nil {
			return nil, err
		}
		req.Assign(a.Topic, int32(partition), replicas)
	}
	told, err := admin.AlterPartitionAssignments(context.Background(), req)
	if err != nil {
		return nil, err
	}
	var refused []string
	for _, row := range told.Sorted() {
		if row.Err != nil {
			refused = append(refused, fmt.Sprintf("%d: %v", row.Partition, row.Err))
		}
	}
	return append([]string{}, refused...), nil
}

func numbers(list string) ([]int32, error) {
	var found []int32
	for _, text := range strings.Split(list, ",") {
		number, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return nil, err
		}
		found = append(found, int32(number))
	}
	return found, nil
}

func moves(admin *kadm.Client, topic string) ([]string, error) {
	topics, err := admin.ListTopics(context.Background(), topic)
	if err != nil {
		return nil, err
	}
	told, err := admin.ListPartitionReassignments(context.Background(), topics.TopicsSet())
	if err != nil {
		return nil, err
	}
	found := []string{}
	for _, row := range told.Sorted() {
		found = append(found, fmt.Sprintf("%d: %s +%s -%s", row.Partition,
			joined(row.Replicas), joined(row.AddingReplicas), joined(row.RemovingReplicas)))
	}
	sort.Strings(found)
	return found, nil
}

func joined(nodes []int32) string {
	var texts []string
	for _, node := range nodes {
		texts = append(texts, strconv.Itoa(int(node)))
	}
	return strings.Join(texts, ",")
}
