"""The job with Paceline, at its default pace."""

import job
import torch
from torch import nn

import paceline


def main() -> None:
    dataset = job.Digits()
    with paceline.join() as fleet:
        model = fleet.model(job.Network())
        optimizer = torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM)
        fleet.track(optimizer=optimizer)
        for step in fleet.steps(dataset, global_batch=job.BATCH, micro_batch=job.BATCH, epochs=job.EPOCHS):
            counted = []
            for x, y, index in step:
                loss = nn.functional.cross_entropy(model(x), y)
                step.backward(loss)
                counted.append(index)
            step.commit(optimizer)
            # Under a deadline, work that came too late is in no update, and comes again.
            counted = torch.cat(counted)[: step.record.samples[fleet.rank]] if counted else []
            job.commit(model, step.epoch, step.index, counted)


if __name__ == "__main__":
    main()
