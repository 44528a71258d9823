"""One version of a model: its text processing, its workers, and the requests that run on it."""

from baton.protocol import CONSTRAINTS, DEFAULT_TENANT
from gateway.config.served_model import ServedModel
from gateway.fleet.model_fleet import ModelFleet
from gateway.orchestration.pipeline import Pipeline
from gateway.pooling.pooling_pipeline import PoolingPipeline


class ModelVersion:
    """Everything that serves one version of a model. While a model is replaced, its name has two versions.

    Belongs to the event loop."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.pooling = PoolingPipeline(pipeline)
        self.num_running = 0  # requests that run on this version

    @property
    def fleet(self) -> ModelFleet:
        """The workers of this version."""
        return self.pipeline.fleet

    @property
    def name(self) -> str:
        """The name by which requests ask for it."""
        return self.fleet.name

    def seen_by(self, tenant: str = DEFAULT_TENANT) -> ServedModel:
        """Return the model as requests of a tenant are checked against it."""
        return self.fleet.model.seen_by(tenant)

    def note_change(self) -> None:
        """Note a change of the fleet: let waiting requests look for a worker, and prepare constraints if they can be
        served."""
        self.pipeline.queues.call_first()
        if self.fleet.can(CONSTRAINTS):
            self.pipeline.text.expect_constraints()

    def close(self) -> None:
        """End the threads that process text."""
        self.pipeline.text.close()
