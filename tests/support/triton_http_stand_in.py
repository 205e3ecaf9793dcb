"""Triton's HTTP API before the gRPC stand-in: it translates requests with binary tensors."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

# As Triton has them.
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: service_pb2_grpc.GRPCInferenceServiceStub
    connections: list[BaseHTTPRequestHandler]

    def setup(self) -> None:
        super().setup()
        self.connections.append(self)

    def do_POST(self) -> None:
        length = int(self.headers["Inference-Header-Content-Length"])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = message(unquote(self.path.split("/")[3]), json.loads(body[:length]), body[length:])
        try:
            header, data = answer(self.stub.ModelInfer(request))
            self.respond(200, header, data)
        except grpc.RpcError as error:
            self.respond(STATUSES.get(error.code(), 500), {"error": error.details()}, b"")

    def respond(self, status: int, header: dict, data: bytes) -> None:
        text = json.dumps(header).encode()
        self.send_response(status)
        if data:
            self.send_header("Inference-Header-Content-Length", str(len(text)))
        self.send_header("Content-Length", str(len(text) + len(data)))
        self.end_headers()
        self.wfile.write(text + data)

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def message(model: str, header: dict, data: bytes) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in header["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        request.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        request.raw_input_contents.append(data[:size])
        data = data[size:]
    assert not data
    for output in header["outputs"]:
        assert output["parameters"] == {"binary_data": True}
        request.outputs.add(name=output["name"])
    return request


def answer(response: service_pb2.ModelInferResponse) -> tuple[dict, bytes]:
    outputs = [
        {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
            "parameters": {"binary_data_size": len(data)},
        }
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    ]
    return {"model_name": response.model_name, "outputs": outputs}, b"".join(response.raw_output_contents)


@contextlib.contextmanager
def http_before(grpc_address: str, port: int = 0, host: str = "127.0.0.1") -> Iterator[ThreadingHTTPServer]:
    """Serve HTTP on a port; the handlers of open connections are in `server.RequestHandlerClass.connections`."""
    with grpc.insecure_channel(grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        handler = type("Handler", (Handler,), {"stub": stub, "connections": []})
        server = ThreadingHTTPServer((host, port), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()
