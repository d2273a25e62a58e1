"""Streams have a status and the key that they were made with; answers have a time; unused streams are found fast."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for name in ("status", "key", "digest"):
        op.add_column("streams", sa.Column(name, sa.String))
    op.add_column("answers", sa.Column("time", sa.DateTime(timezone=True)))
    op.create_index("ix_streams_used", "streams", ["used"])
    op.create_index("ix_streams_token_id_key", "streams", ["token_id", "key"], unique=True)
    # the one above takes every NULL for a different owner
    ownerless = sa.text("token_id IS NULL")
    op.create_index(
        "ix_streams_key", "streams", ["key"], unique=True, sqlite_where=ownerless, postgresql_where=ownerless
    )
