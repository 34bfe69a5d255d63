"""Which regions requests may be signed for, and which ones buckets may be asked to lie in."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.s3_clients import boto3_client
from tests.servers import RunningServer, start_server

REGION = "rack-7"
STRICT = "gateway.strict_region=true"


@pytest.fixture(scope="module", params=[False, True], ids=["any region", "strict"])
def regional(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, bool]]:
    settings = ["storage.engine=memory", f"gateway.region={REGION}"]
    settings += [STRICT] if request.param else []
    with start_server(tmp_path_factory.mktemp("regions") / "data", *settings) as server:
        yield server, request.param


def client_of(server: RunningServer, region: str) -> Any:
    return boto3_client(
        endpoint_url=server.endpoint,
        aws_access_key_id=server.credentials.access_key,
        aws_secret_access_key=server.credentials.secret_key,
        region_name=region,
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.mark.parametrize("region", ["us-east-1", "US", "auto", "elsewhere"])
def test_another_region_is_accepted_unless_the_server_is_strict(
    regional: tuple[RunningServer, bool], region: str
) -> None:
    server, is_strict = regional
    assert client_of(server, REGION).list_buckets()["Buckets"] is not None
    if not is_strict:
        assert client_of(server, region).list_buckets()["Buckets"] is not None
        return
    with pytest.raises(ClientError) as caught:
        client_of(server, region).list_buckets()
    error = caught.value.response["Error"]
    assert error["Code"] == "AuthorizationHeaderMalformed"
    assert REGION in error["Message"]  # the remedy


@pytest.mark.parametrize("constraint", [REGION, "us-east-1", "US", None])
def test_a_bucket_lies_in_the_servers_region_whatever_the_client_knows(
    regional: tuple[RunningServer, bool], constraint: str | None
) -> None:
    client, bucket = client_of(regional[0], REGION), f"regional-{secrets.token_hex(6)}"
    wanted = {"LocationConstraint": constraint} if constraint else {}
    client.create_bucket(Bucket=bucket, CreateBucketConfiguration=wanted)
    assert client.get_bucket_location(Bucket=bucket)["LocationConstraint"] == REGION


def test_a_bucket_that_is_to_lie_elsewhere_is_not_made(
    regional: tuple[RunningServer, bool],
) -> None:
    client = client_of(regional[0], REGION)
    with pytest.raises(ClientError) as caught:
        client.create_bucket(
            Bucket="never-made", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
    assert caught.value.response["Error"]["Code"] == "IllegalLocationConstraintException"
    with pytest.raises(ClientError):
        client.head_bucket(Bucket="never-made")
